"""`quire models`: every architecture, in lines for people and for programs."""

import json

from quire.cli import main
from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS
from quire.config.checkpoint.draft_heads import HEADS


def test_every_architecture_has_a_line_that_describes_it(capsys):
    assert main(["models"]) == 0
    listed, *kinds, draft_heads = capsys.readouterr().out.split("\n\n")
    lines = [line.split(maxsplit=1) for line in listed.splitlines()]
    assert [name for name, _ in lines] == list(MODELS | POOLING_MODELS)
    assert dict(lines)["CohereForCausalLM"].startswith("Command R (Cohere 2024)")
    assert dict(lines)["DeepseekV3ForCausalLM"].endswith("[latent; tested: deepseek-v3, deepseek-v3-halves]")
    assert [kind.partition(":")[0] for kind in kinds] == ["dense", "encoder", "latent", "mixture"]
    assert [line.split()[0] for line in draft_heads.splitlines()[1::2]] == list(HEADS)
    assert draft_heads.count("    needs a ") == 3
    assert all("float32, bfloat16" in kind and "share of the limit: " in kind for kind in kinds)


def test_the_command_prints_json(capsys):
    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rows, draft_heads = rows[: -len(HEADS)], rows[-len(HEADS) :]
    assert [row["draft_head"] for row in draft_heads] == list(HEADS)
    assert all(row["description"] and row["needs"] for row in draft_heads)
    assert [row["architecture"] for row in rows] == list(MODELS | POOLING_MODELS)
    assert all(row["description"] and row["formats"] and row["share_of_limit"] for row in rows)
    assert all("`" in row["share_of_limit"] for row in rows), "the command that measures it"
    assert all(row["tested_variants"] for row in rows)
    assert {row["architecture"]: row["kind"] for row in rows}["BertModel"] == "encoder"

"""`quire models`: every architecture, in lines for people and for programs."""

import json

from quire.cli import main
from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS


def test_every_architecture_has_a_line_that_describes_it(capsys):
    assert main(["models"]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert [name for name, _ in lines] == list(MODELS | POOLING_MODELS)
    assert dict(lines)["CohereForCausalLM"].startswith("Command R (Cohere 2024)")


def test_the_command_prints_json(capsys):
    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["architecture"] for row in rows] == list(MODELS | POOLING_MODELS)
    assert all(row["description"] for row in rows)

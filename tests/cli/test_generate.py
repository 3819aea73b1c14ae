"""quire generate: which prompts it reads, and what it prints."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.cli import generate, main
from quire.cli.arguments import options
from quire.common.outputs import Logprob

from ..scripted_engine import recital, scripted_llm
from .command import Run, chat_recital


def test_a_prompt_goes_through_the_chat_template_unless_raw(run: Run, loaded: dict[str, Any]) -> None:
    assert run("generate", "--prompt", "Hi")[:2] == (0, chat_recital(loaded, "Hi") + "\n")
    num_raw = len(loaded["llm"].engine.tokenizer.encode("Hi"))
    assert run("generate", "--raw", "--prompt", "Hi")[:2] == (0, recital(num_raw) + "\n")


def test_standard_input_is_one_prompt(run: Run, loaded: dict[str, Any]) -> None:
    status, out, _ = run("generate", stdin="two\nlines\n")
    assert (status, out) == (0, chat_recital(loaded, "two\nlines") + "\n")
    status, _, err = run("generate", stdin="")
    assert status == 2
    assert "no prompt was given" in err


def test_a_byte_order_mark_is_no_part_of_a_prompt(run: Run, loaded: dict[str, Any], tmp_path: Path) -> None:
    assert run("generate", stdin="\ufeffone")[1] == chat_recital(loaded, "one") + "\n"
    for name, text in (("a.txt", "one"), ("a.jsonl", '"one"')):
        (tmp_path / name).write_text("\ufeff" + text, encoding="utf-8")
        status, out, _ = run("generate", "--prompts-file", str(tmp_path / name), "--json")
        assert (status, json.loads(out)["text"]) == (0, chat_recital(loaded, "one"))


def test_a_prompt_may_begin_as_an_option(run: Run, loaded: dict[str, Any]) -> None:
    prompt = "--max_tokens is what"
    assert run("generate", "--prompt", prompt)[1] == chat_recital(loaded, prompt) + "\n"


def test_several_prompts_are_shown_with_their_answers(run: Run, loaded: dict[str, Any]) -> None:
    _, out, _ = run("generate", "--prompt", "One", "Number two", "--prompt", "Three")
    blocks = out.split("\n\n")
    assert blocks == [
        f"> {prompt}\n{chat_recital(loaded, prompt)}{chr(10) if prompt == 'Three' else ''}"
        for prompt in ("One", "Number two", "Three")
    ]


@pytest.mark.parametrize("arguments", [("-n", "2"), ("--logprobs", "1"), ("--prompt-logprobs", "0")])
def test_what_only_json_shows_is_refused_without_it(run: Run, arguments: tuple[str, str]) -> None:
    status, out, err = run("generate", "--prompt", "x", *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("quire: -n, --logprobs and --prompt-logprobs have no effect without --json: add it")


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_no_output_is_a_command_to_the_terminal(run: Run, monkeypatch: pytest.MonkeyPatch, num_prompts: int) -> None:
    monkeypatch.setattr("tests.scripted_engine.recital", lambda prompt_len: "a\x1b[2J\x07\tb")
    arguments = ("generate", "--prompt", *["Hi"] * num_prompts)
    assert "a\x1b[2J\x07\tb\n" in run(*arguments)[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "a?[2J?\tb\n" in run(*arguments)[1]
    assert "\x1b" in json.loads(run(*arguments, "--json")[1].splitlines()[0])["text"]


def test_a_file_of_json_lines(run: Run, loaded: dict[str, Any], tmp_path: Path) -> None:
    items = [
        "text",
        {"prompt": "text"},
        {"prompt_token_ids": [5, 6]},
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]},
        {"prompt_token_ids": [99999]},
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join([*map(json.dumps, items), "", ""]))
    status, out, _ = run("generate", "--prompts-file", str(tmp_path / "prompts.jsonl"), "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["num_prompt_tokens"] for row in rows[1:3]] == [rows[0]["num_prompt_tokens"], 2]
    assert [row.get("messages") for row in rows] == [None, None, None, items[3]["messages"], None]
    assert [row["finish_reason"] for row in rows] == ["stop"] * 4 + ["ignored"]
    assert rows[0]["text"] == chat_recital(loaded, "text")
    assert "99999" in rows[4]["error"]
    assert status == 1, "some prompts were refused"


def test_json_lines_contain_all_samples_and_their_logprobs(run: Run, loaded: dict[str, Any]) -> None:
    arguments = ["-n", "2", "--logprobs", "1", "--prompt-logprobs", "0", "--max-tokens", "2", "--raw", "--json"]
    _, out, _ = run("generate", "--prompt", "one two", *arguments)
    row = json.loads(out)
    first, second = row["outputs"]
    assert {name: row[name] for name in first} == first
    assert first["cumulative_logprob"] > second["cumulative_logprob"], "as the executor has it"
    token, likeliest = first["logprobs"][0]
    assert token == {
        "token_id": row["token_ids"][0],
        "logprob": pytest.approx(-0.693, abs=1e-3),
        "rank": 7,
        "token": loaded["llm"].engine.tokenizer.decode(row["token_ids"][:1]),
    }
    assert likeliest["rank"] == 1
    assert row["prompt_logprobs"][0] is None
    assert [len(entries) for entries in row["prompt_logprobs"][1:]] == [1] * (row["num_prompt_tokens"] - 1)
    _, out, _ = run("generate", "--prompt", "one two", "--json")
    assert not {"outputs", "logprobs", "prompt_logprobs", "cumulative_logprob"} & json.loads(out).keys()


def test_json_has_no_infinity() -> None:
    (entry,) = generate._logprobs({5: Logprob(-math.inf, 9, "x")})
    assert entry["logprob"] is None


def test_a_file_of_lines(run: Run, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("One\r\n\nTwo {\n")
    _, out, _ = run("generate", "--prompts-file", str(tmp_path / "prompts.txt"))
    assert re.findall("^> (.*)$", out, re.MULTILINE) == ["One", "Two {"]
    _, out, _ = run("generate", "--prompts-file", "-", stdin="Three\nFour\n")
    assert re.findall("^> (.*)$", out, re.MULTILINE) == ["Three", "Four"]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("broken.jsonl", '"fine"\n{"prompt": ', "line 2: not JSON"),
        ("deep.jsonl", "[" * 5000, "line 1: not JSON"),
        ("wrong.jsonl", '{"text": "x"}', "line 1: must be a string, or an object with"),
        ("wrong.jsonl", "[1, 2]", "line 1: must be a string, or an object with"),
    ],
)
def test_wrong_prompt_files_are_named(run: Run, tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    status, out, err = run("generate", "--prompts-file", str(tmp_path / name))
    assert (status, out) == (2, "")
    assert re.fullmatch(f"quire: .*{name}.*{message}.*\n", err)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"temperature": 0.0, "max_tokens": options.DEFAULT_MAX_TOKENS}),
        (["--temperature", "0.5", "--top-k", "4", "--top-p", "0.9"], {"temperature": 0.5, "top_k": 4, "top_p": 0.9}),
        (["--max-tokens", "3", "--stop", "a", "--stop", "b"], {"max_tokens": 3, "stop": ["a", "b"]}),
        (["--ignore-eos"], {"ignore_eos": True}),
        (["--min-p", "0.1", "--min-tokens", "2"], {"min_p": 0.1, "min_tokens": 2}),
        (["--presence-penalty", "1", "--frequency-penalty", "-1"], {"presence_penalty": 1, "frequency_penalty": -1}),
        (["--repetition-penalty", "1.5", "--bad-words", "a b"], {"repetition_penalty": 1.5, "bad_words": ["a b"]}),
        (
            ["-n", "2", "--logprobs", "3", "--prompt-logprobs", "0", "--json"],
            {"n": 2, "logprobs": 3, "prompt_logprobs": 0},
        ),
        (["--best-of", "3", "--temperature", "1"], {"best_of": 3, "n": 1}),
        (["--truncate-prompt-tokens", "-1"], {"truncate_prompt_tokens": -1}),
    ],
)
def test_sampling_options_become_sampling_params(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], expected: dict[str, Any]
) -> None:
    made: list[SamplingParams] = []

    def keep(given: dict[str, Any], llm: Any) -> SamplingParams:
        made.append(options.sampling_params(given, llm))
        return made[0]

    monkeypatch.setattr(generate, "sampling_params", keep)
    assert run("generate", "--prompt", "x", *arguments)[0] == 0
    assert {name: getattr(made[0], name) for name in expected} == expected


def test_sampling_follows_the_checkpoint_where_it_recommends_something() -> None:
    llm, _ = scripted_llm()
    llm.engine.model_config = FakeConfig({"do_sample": True, "temperature": 0.6, "top_p": 0.95})
    parser = options.argparse.ArgumentParser()
    options.add_sampling_arguments(parser)
    params = options.sampling_params(options.sampling_options(parser.parse_args(["--top-k", "7"])), llm)
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.95, 7)


class FakeConfig:
    def __init__(self, generation_config: dict[str, Any]) -> None:
        self.generation_config = generation_config


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--temperature", "-1", "--prompt", "x"], "temperature=-1.0: must be 0"),
        (["--temperature", "nan", "--prompt", "x"], "temperature=nan: must be 0"),
        (["--max-tokens", "0", "--prompt", "x"], "max_tokens=0: must be at least 1"),
        (["--raw", "--prompt", ""], "the prompt is empty"),
        (
            ["--prompt", "word " * 400],
            "the prompt has .* tokens, and this model's maximum context length is 256 tokens",
        ),
        (["--max-model-len", "many", "--prompt", "x"], "max_model_len='many'"),
        (["--model", "/nowhere", "--prompt", "x"], "'/nowhere'"),
    ],
)
def test_errors_are_one_line_without_a_traceback(run: Run, arguments: list[str], message: str) -> None:
    status, out, err = run("generate", *arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(f"quire: .*{message}.*\n", err)
    with pytest.raises(Exception, match=message):
        main(["generate", "--debug", *arguments])

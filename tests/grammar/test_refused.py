"""Structures that are wrong or hostile: refused with a message, or bounded; the process and its neighbours live on."""

import os
import re
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from quire import InvalidParamsError, SamplingParams, StructuredOutputsParams
from quire.engine.requests import grammar_queue
from quire.text.grammar.trial import TrialProcess, TrialSettings
from tests.grammar.masked_engine import masked_llm, run, structured


def nested(num_levels: int) -> str:
    return '{"items":' * num_levels + "{}" + "}" * num_levels


CIRCULAR: dict[str, object] = {}
CIRCULAR["items"] = CIRCULAR


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "no structure: give exactly one of json, regex, choice, grammar, json_object"),
        ({"json_object": False}, "no structure"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice: give exactly one"),
        ({"json": {}, "json_object": True}, "json and json_object"),
        ({"json": "{"}, "json is not JSON"),
        ({"json": "[1]"}, "an object, not list"),
        ({"json": ["a"]}, "json=['a']: must be a non-empty string or a dict"),
        ({"json": nested(30_000)}, "json"),
        ({"json": {"enum": [f"value {i}" for i in range(100_000)]}}, "at most 262,144 are allowed"),
        ({"json": {"enum": [object()]}}, "cannot be written as JSON"),
        ({"json": CIRCULAR}, "cannot be written as JSON"),
        ({"regex": ""}, "regex='': must be a non-empty string"),
        ({"regex": 5}, "regex=5: must be a non-empty string"),
        ({"regex": "a" * 70_000}, "regex has 70,000 bytes"),
        ({"regex": "\ud800"}, "not valid Unicode"),
        ({"choice": []}, "choice=[]: must be a non-empty list"),
        ({"choice": "yes"}, "choice='yes': must be a non-empty list"),
        ({"choice": ["yes", ""]}, "non-empty strings"),
        ({"choice": ["yes", 1]}, "list of non-empty strings"),
        ({"choice": ["x"] * 10_001}, "10,001 strings"),
        ({"choice": ["\udfff"]}, "not valid Unicode"),
        ({"grammar": ""}, "grammar='': must be a non-empty string"),
        ({"grammar": "root ::= " + '"a" ' * 5_000}, "at most 16,384"),
        ({"json_object": 1}, "json_object=1: must be True or False"),
        ({"regex": "a", "disable_any_whitespace": True}, "can be used with json or json_object or structural_tag, not"),
        ({"json_object": True, "disable_any_whitespace": "yes"}, "must be a bool"),
        ({"json_object": True, "whitespace_pattern": 1}, "must be a str"),
        ({"json_object": True, "whitespace_pattern": " " * 257}, "257 bytes"),
        ({"json_object": True, "whitespace_pattern": " ", "disable_any_whitespace": True}, "not both"),
    ],
)
def test_refused_when_made(fields, message) -> None:
    with pytest.raises(InvalidParamsError, match=re.escape(message)):
        StructuredOutputsParams(**fields)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(InvalidParamsError, match="unknown parameter 'regexp', did you mean 'regex'"):
        StructuredOutputsParams(regexp="a")
    with pytest.raises(msgspec.ValidationError, match="regexp"):
        msgspec.json.decode(b'{"regexp": "a"}', type=StructuredOutputsParams)
    with pytest.raises(InvalidParamsError, match="must be StructuredOutputsParams"):
        SamplingParams(structured_outputs={"regex": "a"})


HOSTILE = {
    "30,000 parentheses": {"regex": "(" * 30_000 + "a" + ")" * 30_000},
    "30,000 parentheses in a pattern": {"json": {"type": "string", "pattern": "(" * 30_000 + ")" * 30_000}},
    "nested quantifiers": {"regex": "(a+)+b"},
    "large counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "states that double": {"regex": "(.*a.{14}){4}"},
    "many alternatives": {"regex": "|".join(f"{i}.*" for i in range(8_000))},
    "word counts": {"regex": r"(\w{1,500} ?){1,500}"},
    "huge enum": {"json": {"enum": [f"v{i}" for i in range(25_000)]}},
    "many choices": {"choice": [f"city number {i * 7919}" for i in range(10_000)]},
    "reference to itself": {"json": {"$ref": "#"}},
    "references in a ring": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "reference to nothing": {"json": {"$ref": "#/$defs/none"}},
    "reference to elsewhere": {"json": {"$ref": "file:///etc/passwd"}},
    "deep schema": {"json": nested(100)},
    "deeper schema": {"json": nested(900)},
    "many properties": {"json": {"properties": {f"p{i}": {"type": "string"} for i in range(9_000)}}},
    "product of alternatives": {
        "json": {"allOf": [{"anyOf": [{"properties": {f"{i} {j}": {}}} for j in range(4)]} for i in range(12)]}
    },
    "patterns at once": {
        "json": {"allOf": [{"type": "string", "pattern": f"a.*{c}.*"} for c in "bcdefghijklmnopqrstuvwxyz"]}
    },
    "disjoint patterns": {"json": {"patternProperties": {f"^x{i}$": {"type": "integer"} for i in range(1_000)}}},
    "many multiples": {"json": {"anyOf": [{"type": "integer", "multipleOf": 10_007 + i} for i in range(50)]}},
    "a million items": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 1_000_000}},
    "a billion characters": {"json": {"type": "string", "maxLength": 10**9}},
    "no value": {"json": {"type": "integer", "minimum": 5, "maximum": 3}},
    "keyword that is not known": {"json": {"type": "array", "uniqueItems": True}},
    "deep groups": {"grammar": "root ::= " + "(" * 5_000 + '"a"' + ")" * 5_000},
    "deep groups in Lark": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000},
    "many rules": {
        "grammar": "root ::= r0\n" + "".join(f'r{i} ::= "a" r{i + 1}\n' for i in range(300)) + 'r300 ::= "b"'
    },
    "ambiguous": {"grammar": 'root ::= root root | root root root | "a" | "aa" | ""'},
    "left recursion": {"grammar": 'root ::= root "a" | "a"'},
    "no way out": {"grammar": 'root ::= "a" root'},
    "no way out in Lark": {"grammar": 'start: "a" start'},
    "a billion letters": {"regex": "a{1000000000}"},
    "counts of counts": {"regex": "((a{1000}){1000}){1000}"},
    "letters that may be missing": {"regex": "(a?){30000}a{30000}"},
    "many ambiguous rules": {
        "grammar": "start: " + "|".join(f"x{i}" for i in range(500)) + "\n"
        + "".join(f"x{i}: x{i} A | A\n" for i in range(500)) + "A: /[ -~]/"
    },
    "undefined rule": {"grammar": "root ::= nothing"},
    "token beyond the vocabulary": {"grammar": "start: <[999999]>"},
    "whitespace pattern": {"json_object": True, "whitespace_pattern": "((("},
    "look-ahead": {"regex": "(?=a)b"},
    "reference back": {"regex": r"(a)\1"},
}  # fmt: skip


REFUSED = {
    "30,000 parentheses",
    "30,000 parentheses in a pattern",
    "reference to nothing",
    "reference to elsewhere",
    "deeper schema",
    "many properties",
    "patterns at once",
    "disjoint patterns",
    "many multiples",
    "no value",
    "keyword that is not known",
    "deep groups",
    "deep groups in Lark",
    "undefined rule",
    "token beyond the vocabulary",
    "whitespace pattern",
    "look-ahead",
    "reference back",
    "many ambiguous rules",
    "no way out",
    "no way out in Lark",
    "a billion letters",
    "counts of counts",
    "letters that may be missing",
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_structures_harm_no_other_request(name, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_queue, "COMPILE_LIMIT_S", 600)  # a trial has a low priority, and its own limits
    llm, _ = masked_llm()
    llm.engine.add_request("hostile", "a", structured(max_tokens=40, temperature=2.0, **HOSTILE[name]))
    llm.engine.add_request("neighbour", "a", structured(choice=["I am well"]))
    outputs = run(llm)
    assert outputs["neighbour"].outputs[0].text == "I am well"
    hostile = outputs["hostile"]
    assert hostile.outputs[0].finish_reason in ("stop", "length", "ignored")
    if name in REFUSED or hostile.outputs[0].finish_reason == "ignored":
        assert 10 < len(hostile.error) < 500
        assert "is rejected: " in hostile.error
    assert llm.engine.blocks.num_used_blocks == 0


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"uniqueItems": True}, 'keywords of JSON schema that are not supported: "uniqueItems"; leave them out'),
        (
            {"properties": {"a": {"if": {"type": "string"}, "then": {"minLength": 3}}}},
            'keywords of JSON schema that are not supported: "if", "then"; leave them out',
        ),
        (
            {"oneOf": [{"type": "string"}, {"minLength": 2}]},
            "oneOf is supported only for alternatives that exclude each other; use anyOf",
        ),
    ],
)
def test_a_keyword_that_is_not_supported_is_named(schema: dict[str, Any], said: str) -> None:
    llm, _ = masked_llm()
    llm.engine.add_request("a", "a", structured(json=schema))
    assert run(llm)["a"].error == f"json is rejected: {said}"


def test_a_trial_runs_where_processor_time_is_limited_already() -> None:
    """As by `ulimit -t`: a process cannot raise its own hard limits."""
    program = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (600, 600))\n"
        "from quire import StructuredOutputsParams\n"
        "from quire.text.grammar.trial import TrialProcess, TrialSettings\n"
        "trial = TrialProcess(TrialSettings(1000, {0: '<end>'}))\n"
        "print(bool(trial.check(StructuredOutputsParams(regex='a'))))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "True\n", ended.stderr


def test_a_fork_leaves_the_trial_of_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialProcess(TrialSettings(1000, {0: "<end>"}))
    assert trial.check(StructuredOutputsParams(regex="a"))
    child = trial._child
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        trial.close()
    assert child.poll() is None
    child.kill()
    child.communicate()


def test_a_trial_that_was_killed_is_followed_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = TrialProcess(TrialSettings(1000, {0: "<end>"}, limit_s=1))
    assert trial.check(StructuredOutputsParams(regex="a"))
    first = trial._child
    with pytest.raises(InvalidParamsError, match="more than 1 s"):
        trial.check(StructuredOutputsParams(**HOSTILE["patterns at once"]))
    assert first.poll() is not None
    assert trial.check(StructuredOutputsParams(regex="a"))
    second = trial._child
    second.kill()
    second.wait()
    assert trial.check(StructuredOutputsParams(regex="a")), "it is not the grammar's fault"
    last = trial._child
    with monkeypatch.context() as patched:
        start, killed = TrialProcess._start, []

        def start_and_kill(owner: TrialProcess) -> Any:
            child = start(owner)
            if len(killed) < num_to_kill:
                killed.append(child)
                child.kill()
                child.wait()
            return child

        patched.setattr(TrialProcess, "_start", start_and_kill)
        for num_to_kill in (1, 2):
            killed.clear()
            last.kill()
            last.wait()  # before it is asked: that says nothing of the grammar
            if num_to_kill == 1:
                assert trial.check(StructuredOutputsParams(regex="a")), "another one is tried"
                last = trial._child
            else:
                with pytest.raises(InvalidParamsError, match="is rejected"):
                    trial.check(StructuredOutputsParams(regex="a"))
            assert len(killed) == num_to_kill
    assert trial.check(StructuredOutputsParams(regex="a"))
    last = trial._child
    del trial
    assert last.poll() is not None

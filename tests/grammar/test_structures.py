"""Every structure gives valid output, however it is drawn, batched, preempted and forked."""

import json
import re

import jsonschema
import numpy as np
import pytest
from msgspec.structs import replace

from quire import LLM, RequestOutput, SamplingParams
from tests.grammar.masked_engine import MaskedExecutor, masked_llm, run, structured, wait_for_grammars

PERSON = {
    "type": "object",
    "properties": {
        "first_name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["first_name", "age", "tags"],
    "additionalProperties": False,
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number", "multipleOf": 0.5, "minimum": -3, "maximum": 3},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
MANY_FORMS = {
    "type": "object",
    "properties": {
        "when": {"type": "string", "format": "date-time"},
        "id": {"type": "string", "format": "uuid"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        "one": {"oneOf": [{"type": "boolean"}, {"type": "string", "minLength": 1, "maxLength": 3}]},
        "pair": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": {"a": [1, None]}}], "items": False},
        "all": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 9}]},
    },
    "required": ["when", "id", "code", "one", "pair", "all"],
    "additionalProperties": {"type": "integer"},
}
CHOICES = ["yes", "no", "perhaps (50 %)", "a|b", "x{2}", "été \\ [/]", "line\nbreak", "yes!"]
STRUCTURES = {
    "schema": {"json": PERSON},
    "schema as text": {"json": json.dumps(PERSON), "disable_any_whitespace": True},
    "recursive schema": {"json": TREE, "disable_any_whitespace": True},
    "many forms": {"json": MANY_FORMS, "whitespace_pattern": " ?"},
    "any object": {"json_object": True, "disable_any_whitespace": True},
    "regex": {"regex": r"([a-f]{2}/)+[0-9]{1,3}"},
    "anchored regex": {"regex": "^(ab|cd){2,5}$"},
    "choice": {"choice": CHOICES},
    "gbnf": {"grammar": 'root ::= "f(" arg ("," arg)* ")"\narg ::= [0-9]+ | root\n'},
    "lark": {"grammar": 'start: "f(" arg ("," arg)* ")"\narg: /[0-9]+/ | start\n'},
}


def is_valid(text: str, structure: dict[str, object]) -> bool:
    if "choice" in structure:
        return text in structure["choice"]
    if "regex" in structure:
        return re.fullmatch(structure["regex"], text) is not None
    if "grammar" in structure:
        return re.fullmatch(r"f\([0-9f(),]*\)", text) is not None and _parses(text)
    schema = structure.get("json", {"type": "object"})
    value = json.loads(text)
    schema = json.loads(schema) if isinstance(schema, str) else schema
    jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    return "disable_any_whitespace" not in structure or not re.search(
        r'[\s]["\]}:,]', re.sub(r'"(?:[^"\\]|\\.)*"', '""', text)
    )


def _parses(call: str) -> bool:
    """Whether it is nested calls of f with at least one argument each: what is innermost is a number in the end."""
    while (shorter := re.sub(r"f\(\d+(,\d+)*\)", "0", call)) != call:
        call = shorter
    return call == "0"


def check(output: RequestOutput, structure: dict[str, object]) -> int:
    """Every sample that ended by itself is valid; returns how many did."""
    assert output.error is None
    ended = [sample for sample in output.outputs if sample.finish_reason == "stop"]
    assert all(sample.finish_reason == "length" for sample in output.outputs if sample not in ended)
    for sample in ended:
        assert is_valid(sample.text, structure), sample.text
    return len(ended)


@pytest.mark.parametrize(
    "how", [{"temperature": 1.5}, {"temperature": 0}, {"top_k": 1}, {"top_k": 20, "n": 3}], ids=str
)
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_output_has_the_form(structure, how) -> None:
    llm, _ = masked_llm()
    outputs = llm.generate(["a", "b", "c"], [structured(seed=s, **how, **structure) for s in range(3)], use_tqdm=False)
    num_ended = sum(check(output, structure) for output in outputs)
    assert num_ended > 0 or how in ({"temperature": 0}, {"top_k": 1})  # the same string without end


@pytest.fixture
def tiny() -> tuple[LLM, MaskedExecutor]:
    return masked_llm(num_gpu_blocks_override=40, block_size=4, max_model_len=120, enable_prefix_caching=False)


def mixed_params() -> list[tuple[dict[str, object], object]]:
    return [
        (structure, structured(max_tokens=100, seed=seed, temperature=1.2, n=1 + seed % 2, **structure))
        for seed, structure in enumerate([*STRUCTURES.values()] * 2)
    ]


def test_grammars_of_one_batch_never_mix(tiny) -> None:
    llm, executor = tiny
    solo = [llm.generate([[5, 6, 7]], params, use_tqdm=False)[0] for _, params in mixed_params()]
    for i, (_, params) in enumerate(mixed_params()):
        llm.engine.add_request(str(i), [5, 6, 7], params)
    outputs = run(llm)
    assert llm.engine.stats().num_preemptions > 0
    for i, (structure, _) in enumerate(mixed_params()):
        check(outputs[str(i)], structure)
        assert [s.token_ids for s in outputs[str(i)].outputs] == [s.token_ids for s in solo[i].outputs]
    assert max(executor.token_counts) > 1


def test_preempted_in_every_step(tiny) -> None:
    llm, _ = tiny
    for i, (_, params) in enumerate(mixed_params()):
        solo = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0]
        llm.engine.add_request("x", [5, 6, 7], params)
        turn, output = 0, None
        while llm.engine.has_unfinished_requests():
            turn += 1
            if turn % 2 and llm.engine.requests.running:
                llm.engine.scheduler.preemptor.preempt(llm.engine.requests.running[0])
            output = next(iter(llm.engine.step()), output)
        assert [s.token_ids for s in output.outputs] == [s.token_ids for s in solo.outputs], i


def test_a_failed_step_leaves_the_grammar_where_it_was() -> None:
    llm, executor = masked_llm()
    params = structured(temperature=1.5, json=PERSON)
    expected = llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids
    llm.engine.add_request("x", "a", params)
    outputs = {}
    while llm.engine.has_unfinished_requests():
        executor.num_failures = 1
        assert llm.engine.step() == []
        outputs |= {output.request_id: output for output in llm.engine.step()}
    assert outputs["x"].outputs[0].token_ids == expected


def add_with_draw(llm: LLM, request_id: str, params: object, **changes: object) -> None:
    """A request whose draws say something more."""
    llm.engine.add_request(request_id, "a", params)
    (seq,) = llm.engine._groups[request_id].seqs
    seq.draw_with(tuple(replace(draw, **changes) for draw in seq.draws))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    wait_for_grammars(monkeypatch)


def compile_grammar(llm: LLM, executor: MaskedExecutor, structure: dict[str, object]) -> None:
    """So that the trial is not among the steps counted from here on."""
    llm.generate(["a"], structured(max_tokens=1, **structure), use_tqdm=False)
    executor.num_steps = 0


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.usefixtures("patient")
def test_jumping_ahead_saves_steps_and_changes_nothing(structure) -> None:
    llm, executor = masked_llm()
    compile_grammar(llm, executor, structure)
    params = structured(temperature=1.2, **structure)
    (jumped,) = llm.generate(["a"], params, use_tqdm=False)
    num_steps, executor.num_steps = executor.num_steps, 0
    add_with_draw(llm, "x", params, logprobs=0)
    one_by_one = run(llm)["x"]
    assert jumped.outputs == one_by_one.outputs
    assert num_steps <= executor.num_steps


@pytest.mark.usefixtures("patient")
def test_forced_text_is_run_as_one_chunk() -> None:
    llm, executor = masked_llm()
    structure = {"regex": r"\{\"the quick brown fox\": \"jumps over the lazy dog\"\}"}
    compile_grammar(llm, executor, structure)
    (output,) = llm.generate(["a"], structured(**structure), use_tqdm=False)
    check(output, structure)
    assert executor.num_steps <= 2
    assert output.outputs[0].token_ids == llm.engine.tokenizer.encode(output.outputs[0].text)


def test_max_tokens_and_stop_strings_hold_in_forced_text() -> None:
    llm, _ = masked_llm()
    structure = {"regex": "x the quick brown fox jumps over the lazy dog"}
    (short,) = llm.generate(["a"], structured(max_tokens=5, **structure), use_tqdm=False)
    assert (short.outputs[0].finish_reason, len(short.outputs[0].token_ids)) == ("length", 5)
    assert structure["regex"].startswith(short.outputs[0].text)
    (stopped,) = llm.generate(["a"], structured(stop=["fox"], **structure), use_tqdm=False)
    assert (stopped.outputs[0].text, stopped.outputs[0].stop_reason) == ("x the quick brown ", "fox")


def test_the_end_token_comes_only_where_the_output_may_end() -> None:
    llm, _ = masked_llm()
    eos = llm.engine.model_config.eos_token_ids
    for ignore_eos in (False, True):
        params = structured(temperature=2.0, regex="(ab)+", n=16, max_tokens=64, ignore_eos=ignore_eos)
        (output,) = llm.generate(["a"], params, use_tqdm=False)
        assert check(output, {"regex": "(ab)+"}) > 8
        for sample in output.outputs:
            assert not eos & set(sample.token_ids[:-1])
            assert sample.finish_reason == "length" or sample.token_ids[-1] in eos


def test_without_an_end_token_a_finished_grammar_ends_the_output() -> None:
    llm, _ = masked_llm(share_compiler=False)
    llm.engine.grammars.compiler._eos_token_ids = []
    llm.engine.committer.eos_token_ids = frozenset()
    (output,) = llm.generate(["a"], structured(choice=["yes", "no"]), use_tqdm=False)
    assert check(output, {"choice": ["yes", "no"]}) == 1
    (output,) = llm.generate(["a"], structured(regex="a+", max_tokens=9), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    assert set(output.outputs[0].text) == {"a"}


def test_a_draw_that_the_grammar_does_not_allow_ends_the_request_and_says_why() -> None:
    llm, _ = masked_llm()
    (b,) = llm.engine.tokenizer.encode("b")
    add_with_draw(llm, "none", structured(regex="abc"), allowed_token_ids=(b,))
    add_with_draw(llm, "enough", structured(regex="b{2}c*"), allowed_token_ids=(b,))
    outputs = run(llm)
    assert outputs["none"].outputs[0].finish_reason == "length"
    assert "stopped after 0 tokens" in outputs["none"].error
    assert outputs["enough"].error is None
    assert (outputs["enough"].outputs[0].text, outputs["enough"].outputs[0].finish_reason) == ("bb", "stop")


def test_a_grammar_that_grows_too_complex_ends_its_request_alone() -> None:
    llm, _ = masked_llm()
    llm.engine.add_request("wild", "a", structured(temperature=3.0, regex="((a{1,100}){1,100}){1,100}"))
    llm.engine.add_request("tame", "a", structured(choice=["yes, this one"]))
    outputs = run(llm)
    assert outputs["tame"].outputs[0].text == "yes, this one"
    assert re.fullmatch("a*", outputs["wild"].outputs[0].text)
    if outputs["wild"].error is not None:
        assert re.match(r"stopped after \d+ tokens: too many", outputs["wild"].error)


def test_samples_and_mixtures_with_free_requests() -> None:
    llm, _ = masked_llm()
    free = SamplingParams(seed=3, max_tokens=20, temperature=1.5)
    alone = llm.generate(["a"], free, use_tqdm=False)[0].outputs[0].token_ids
    both = llm.generate(["a", "b"], [free, structured(json=PERSON, n=4)], use_tqdm=False)
    assert both[0].outputs[0].token_ids == alone
    assert check(both[1], {"json": PERSON}) == 4
    assert len({sample.text for sample in both[1].outputs}) > 1


def test_masks_cover_a_padded_vocabulary() -> None:
    llm, executor = masked_llm(share_compiler=False)
    executor.vocab_size = llm.engine.grammars.compiler._vocab_size = 8200
    executor.logits = np.append(executor.logits, [100.0] * 8)  # padding would always be drawn
    (output,) = llm.generate(["a"], structured(json=PERSON), use_tqdm=False)
    assert check(output, {"json": PERSON}) == 1

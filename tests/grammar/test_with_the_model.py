"""The embedded checkpoint, whose own taste is another: its output has the form all the same."""

import random
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, InvalidParamsError, SamplingParams, StructuredOutputsParams
from tests.grammar.masked_engine import structured
from tests.grammar.test_structures import STRUCTURES, check, is_valid


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(max_model_len=512, num_gpu_blocks_override=200)


PARAMS = [
    {"temperature": 1.5},
    {"temperature": 1.2, "top_k": 5, "n": 3},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "logit_bias": {4: 2.0}},
    {"temperature": 1.0, "logprobs": 2, "min_p": 0.05, "min_tokens": 3},
]


def test_all_forms_at_once_and_each_alone(llm) -> None:
    params = [
        structured(max_tokens=150, seed=i, **how, **structure)
        for i, how in enumerate(PARAMS)
        for structure in STRUCTURES.values()
    ]
    structures = list(STRUCTURES.values()) * len(PARAMS)
    prompts = [f"Number {i}: " for i in range(len(params))]
    free = SamplingParams(seed=1, max_tokens=30, temperature=1.0)
    outputs = llm.generate([*prompts, "Once"], [*params, free], use_tqdm=False)
    num_ended = sum(check(output, structure) for output, structure in zip(outputs, structures, strict=False))
    assert num_ended > len(params) / 2
    for i in range(0, len(params), 7):
        alone = llm.generate(prompts[i], params[i], use_tqdm=False)[0]
        assert alone.outputs == outputs[i].outputs
    assert llm.generate("Once", free, use_tqdm=False)[0].outputs == outputs[-1].outputs


def schemas(count: int) -> list[dict[str, Any]]:
    """Schemas of objects, up to three levels deep, whose values have bounded lengths."""
    rng = random.Random(count)
    leaves = [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 99},
        {"enum": ["red", "green", "blue"]},
        {"type": "string", "maxLength": 10},
        {"type": "null"},
    ]

    def schema(depth: int) -> dict[str, Any]:
        if depth == 0:
            return rng.choice(leaves)
        kind = rng.random()
        if kind < 0.3:
            return {"type": "array", "items": schema(depth - 1), "minItems": 1, "maxItems": 2}
        if kind < 0.6:
            return rng.choice(leaves)
        return an_object(depth)

    def an_object(depth: int) -> dict[str, Any]:
        names = rng.sample(["name", "age", "id", "tags", "kind", "city"], rng.randint(1, 3))
        fields = {name: schema(depth - 1) for name in names}
        return {"type": "object", "properties": fields, "required": names, "additionalProperties": False}

    return [an_object(2) for _ in range(count)]


def test_json_ends_within_few_tokens_although_the_model_likes_whitespace(llm) -> None:
    tried = schemas(100)
    params = [structured(max_tokens=128, seed=i, temperature=1.0, json=schema) for i, schema in enumerate(tried)]
    outputs = llm.generate(["Give me JSON: "] * 100, params, use_tqdm=False)
    assert sum(check(output, {"json": schema}) for output, schema in zip(outputs, tried, strict=True)) >= 98


def test_where_params_and_grammar_have_nothing_in_common_the_grammar_holds(llm) -> None:
    (b,) = llm.engine.tokenizer.encode("b")
    for ban in ({"allowed_token_ids": [b]}, {"bad_words": ["c", "d", "cc", "cd"]}, {"min_tokens": 20}):
        output = llm.generate(["a"], structured(regex="c{1,5}d", **ban), use_tqdm=False)[0]
        assert check(output, {"regex": "c{1,5}d"}) == 1


def test_logprobs_are_those_of_every_token(llm) -> None:
    structure = {"choice": ["the quick brown fox", "the lazy dog"]}
    output = llm.generate("a", structured(logprobs=0, **structure), use_tqdm=False)[0].outputs[0]
    assert is_valid(output.text, structure)
    assert len(output.logprobs) == len(output.token_ids)


@pytest.mark.parametrize("name", STRUCTURES)
def test_every_beam_has_the_form(llm, name) -> None:
    structure = STRUCTURES[name]
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=60,
        early_stopping=True,
        include_stop_str_in_output=True,  # two that differ in nothing but their end token are two
        structured_outputs=StructuredOutputsParams(**structure),
    )
    (output,) = llm.beam_search("Number 7: ", params)
    prompt = len(llm.engine.tokenizer.encode("Number 7: "))
    ended = [sequence for sequence in output.sequences if sequence.finish_reason == "stop"]
    texts = [llm.engine.tokenizer.decode(sequence.tokens[prompt:], True) for sequence in ended]
    assert all(is_valid(text, structure) for text in texts)
    assert len({tuple(sequence.tokens) for sequence in ended}) == len(ended)
    assert ended or name != "choice"
    assert llm.engine.stats().num_used_blocks == 0


def test_beams_find_the_likeliest_of_a_list() -> None:
    """Each of the list can be cut into tokens in several ways; preempted before every step or not, the search finds the
    same ones."""
    words = ["yes", "no", "perhaps", "never"]
    params = BeamSearchParams(
        beam_width=4,
        max_tokens=12,
        length_penalty=0.0,
        include_stop_str_in_output=True,
        structured_outputs=StructuredOutputsParams(choice=words),
    )
    found = []
    for preempted in (False, True):
        llm = LLM(max_model_len=64, num_gpu_blocks_override=12)
        llm.engine.add_request("0", "Is it? ", params)
        while llm.engine.has_unfinished_requests():
            if preempted and llm.engine.requests.running:
                llm.engine.scheduler.preemptor.preempt(llm.engine.requests.running[0])
            outputs = llm.engine.step()
            llm.engine.blocks.check_integrity()
        found.append(outputs[0].outputs)
    assert found[0] == found[1]
    assert {output.text for output in found[0]} <= set(words)
    assert len({tuple(output.token_ids) for output in found[0]}) == 4
    logprobs = [output.cumulative_logprob for output in found[0]]
    assert logprobs == sorted(logprobs, reverse=True)


def test_beams_of_a_grammar_end_at_its_end() -> None:
    with pytest.raises(InvalidParamsError, match="ignore_eos"):
        BeamSearchParams(2, 5, ignore_eos=True, structured_outputs=StructuredOutputsParams(choice=["a"]))

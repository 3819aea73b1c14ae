"""What comes over the wire, piece by piece, is what the offline door gives: text, tokens, log-probabilities."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields

from quire import (
    LLM,
    BeamSearchParams,
    CompletionOutput,
    PromptTooLongError,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)

from .door import Door

ARGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 96, "num_threads": 1}
KINDS = ("cumulative", "delta", "final_only")
STRUCTURES = ({"choice": ["yes", "no"]}, {"regex": "[a-c]{2,6}"}, {"json": {"type": "integer"}}, {"regex": "("})


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[LLM, Door]]:
    """Both doors, which get the same requests in the same order: seeds are the same even where none is given."""
    door = Door(**ARGS)
    yield LLM(**ARGS), door
    door.close()


def some(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


@st.composite
def sampling_params(draw: Any) -> SamplingParams:
    structure = draw(some(st.sampled_from(STRUCTURES))) if draw(st.integers(0, 4)) == 0 else None
    n, max_tokens = draw(st.sampled_from((1, 1, 3))), draw(st.integers(1, 24))
    temperature = draw(st.sampled_from((0.0, 0.7, 1.3)))
    return SamplingParams(
        n=n,
        best_of=n + 1 if temperature and draw(st.booleans()) else None,
        temperature=temperature,
        seed=draw(some(st.integers(0, 99))),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)) if draw(st.booleans()) else 0,
        stop=draw(some(st.lists(st.sampled_from(["e", "th", " a", "\n", "or", "self", "."]), max_size=3))),
        stop_token_ids=draw(some(st.just(list(range(300, 700))))),
        include_stop_str_in_output=draw(st.booleans()),
        ignore_eos=draw(st.booleans()),
        logprobs=draw(some(st.integers(0, 3))),
        prompt_logprobs=draw(some(st.integers(0, 2))),
        bad_words=draw(some(st.just(["the", "self"]))),
        skip_special_tokens=draw(st.booleans()),
        detokenize=True,
        structured_outputs=None if structure is None else StructuredOutputsParams(**structure),
        output_kind=draw(st.sampled_from(KINDS)),
    )


@st.composite
def beam_params(draw: Any) -> BeamSearchParams:
    return BeamSearchParams(
        draw(st.integers(1, 3)), draw(st.integers(1, 8)), include_stop_str_in_output=draw(st.booleans())
    )


prompts = st.sampled_from(
    ["def f(", "Once upon a time", "import os\n", "x", {"prompt_token_ids": [5, 6, 7]}]
) | st.lists(st.integers(3, 8191), min_size=1, max_size=40)
requests = st.lists(st.tuples(prompts, sampling_params() | sampling_params() | beam_params()), min_size=1, max_size=5)


def offline(llm: LLM, wanted: list[tuple[Any, Any]]) -> list[RequestOutput]:
    done = {}
    for i, (prompt, params) in enumerate(wanted):
        if isinstance(params, SamplingParams):
            params = replace_fields(params, output_kind="final_only")
        llm.engine.add_request(str(i), prompt, params)
    while llm.engine.has_unfinished_requests():
        done |= {output.request_id: output for output in llm.engine.step() if output.finished}
    return [done[str(i)] for i in range(len(wanted))]


def joined(deltas: list[CompletionOutput]) -> CompletionOutput:
    """One sample of the deltas' outputs."""
    has_logprobs = deltas[0].logprobs is not None
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
        logprobs=[row for delta in deltas for row in delta.logprobs or ()] if has_logprobs else None,
    )


def whole(outputs: list[RequestOutput], kind: str) -> RequestOutput:
    """What was told in all, however it came."""
    last = outputs[-1]
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    if kind == "final_only":
        assert len(outputs) == 1
    if kind == "cumulative":
        for before, after in pairwise(outputs):
            for old, new in zip(before.outputs, after.outputs, strict=False):
                assert new.text.startswith(old.text)
    if kind != "delta" or len(outputs) == 1:
        return last
    told: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for delta in output.outputs:
            told.setdefault(delta.index, []).append(delta)
    scores = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    assert len(scores) <= 1, "once"
    samples = [joined(told[index]) for index in sorted(told)]
    return replace(last, outputs=samples, prompt_logprobs=scores[0] if scores else None)


def told(output: RequestOutput) -> tuple[Any, ...]:
    """All but names, times and hits."""
    return output.prompt, output.prompt_token_ids, output.outputs, output.finished, output.error, output.prompt_logprobs


@settings(max_examples=30, deadline=None)
@given(wanted=requests)
def test_every_request_is_told_the_same(both: tuple[LLM, Door], wanted: list[tuple[Any, Any]]) -> None:
    llm, door = both
    expected = offline(llm, wanted)
    got = door.run(door.all_outputs(wanted))
    for (_, params), output, outputs in zip(wanted, expected, got, strict=True):
        assert told(whole(outputs, getattr(params, "output_kind", "final_only"))) == told(output)
    door.run(door.drained())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_end_each_sample_as_offline(both: tuple[LLM, Door], kind: str, include: bool) -> None:
    llm, door = both
    params = SamplingParams(
        n=3, seed=1, max_tokens=40, stop=["e", "or"], include_stop_str_in_output=include, logprobs=1, output_kind=kind
    )
    wanted = [("def fibonacci(n):", params)]
    (expected,) = offline(llm, wanted)
    assert (
        len({sample.stop_reason for sample in expected.outputs}) > 1
        or len({len(sample.token_ids) for sample in expected.outputs}) > 1
    ), "the samples end in different places"
    ((*outputs,),) = door.run(door.all_outputs(wanted))
    assert told(whole(outputs, kind)) == told(expected)


def test_a_grammar_that_ends_with_the_last_token_allowed_is_a_stop(both: tuple[LLM, Door]) -> None:
    llm, door = both
    wanted = [("a", SamplingParams(seed=0, max_tokens=1, structured_outputs=StructuredOutputsParams(choice=["a"])))]
    (expected,) = offline(llm, wanted)
    assert expected.outputs[0].finish_reason == "stop"
    ((output,),) = door.run(door.all_outputs(wanted))
    assert told(output) == told(expected)


def test_scores_are_those_of_score_tokens(both: tuple[LLM, Door]) -> None:
    llm, door = both
    (expected,) = llm.score_tokens("def f(x):", " return x + 1", use_tqdm=False)
    output = door.run(door.llm.score("def f(x):", " return x + 1", request_id="score"))
    known = [(i, row) for i, row in zip(output.prompt_token_ids, output.prompt_logprobs, strict=True) if row]
    assert [token_id for token_id, _ in known] == expected.token_ids
    assert [row[token_id].logprob for token_id, row in known] == expected.logprobs
    alone = door.run(door.llm.score("def f(x):", None, request_id="score"))
    assert [row is None for row in alone.prompt_logprobs] == [True] + [False] * (len(alone.prompt_token_ids) - 1)


def test_prompts_of_chats_and_texts_become_the_same_tokens(both: tuple[LLM, Door]) -> None:
    llm, door = both
    messages = [{"role": "user", "content": "Hi"}]
    assert door.llm.chat_prompt(messages) == llm.chat_prompt(messages)
    for text in ("short", "a long text, which goes to a thread. " * 150):
        assert door.run(door.llm.encode(text)) == llm.get_tokenizer().encode(text)
    with pytest.raises(PromptTooLongError, match="characters"):
        door.run(door.llm.encode("a" * 10_000))
    assert door.llm.default_sampling_params() == llm.default_sampling_params()
    assert door.llm.model_config == llm.engine.model_config

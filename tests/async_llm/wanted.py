"""Requests of every kind, and what becomes of them by way of LLM: what AsyncLLM has to tell too."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st
from msgspec.structs import replace as replace_fields

from quire import LLM, BeamSearchParams, CompletionOutput, RequestOutput, SamplingParams, StructuredOutputsParams

KINDS = ("cumulative", "delta", "final_only")
STRUCTURES = ({"choice": ["yes", "no"]}, {"regex": "[a-c]{2,6}"}, {"json": {"type": "integer"}}, {"regex": "("})


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

"""How outputs are made of what the engine sends."""

import asyncio

import msgspec

from quire.common.outputs import RequestOutput
from quire.common.params import SamplingParams
from quire.engine.process.messages import AddRequest, AddScoring, RequestDelta, SequenceDelta
from quire.engine.requests.logprobs import LogprobRows, PromptScores
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.interfaces.async_llm.output_processor import RequestState
from tests.scripted_engine import logprobs


def request_state(params: SamplingParams, eos_token_ids: frozenset[int] = frozenset()) -> RequestState:
    message = AddRequest(1, "a", [5, 6], "", 0.0, False, msgspec.Raw(b""))
    return RequestState(message, OutputBuilder("a", [5, 6], params, 0.0), SampleOutput(params, eos_token_ids))


def test_others_have_their_turn_while_many_logprobs_are_made() -> None:
    params, scores = SamplingParams(), PromptScores(1, list(range(1000)), 1, str)
    sample = SampleOutput(params, logprobs=LogprobRows(str))
    assert sample.logprobs is not None
    for rows in (scores.rows, sample.logprobs):
        rows.extend(logprobs(range(1000), 1))
    outputs = OutputBuilder("a", list(range(1001)), params, 0.0, scores=scores)
    request = RequestState(AddScoring(1, "a", outputs.prompt_token_ids, "", 1), outputs, sample)

    async def main() -> int:
        making, turns = asyncio.create_task(request.next_output()), 0
        request.abort()
        while not making.done():
            turns += 1
            await asyncio.sleep(0)
        assert len(making.result().prompt_logprobs or ()) == 1001
        return turns

    assert asyncio.run(main()) > 20


def last_output(request: RequestState, *deltas: RequestDelta) -> RequestOutput:
    for delta in deltas:
        request.update(delta)
    return asyncio.run(request.next_output())


def test_drafts_behind_the_end_of_a_sample_are_not_in_the_output() -> None:
    request = request_state(SamplingParams(max_tokens=9, detokenize=False), frozenset({9}))
    first = SequenceDelta(0, [5, 6], accepted_drafts=[0, 1], predicted_drafts=[1])
    last = SequenceDelta(0, [7, 9, 8], accepted_drafts=[0, 1, 2], predicted_drafts=[1, 2])
    output = last_output(request, RequestDelta(1, [first], False), RequestDelta(1, [last], False))
    (choice,) = output.outputs
    assert (choice.token_ids, choice.accepted_drafts, choice.predicted_drafts) == ([5, 6, 7, 9], [0, 1, 2, 3], [1, 3])


def test_samples_begin_with_the_first_delta_that_has_them() -> None:
    request = request_state(SamplingParams(n=2, max_tokens=4, detokenize=False), frozenset({9}))
    output = last_output(
        request,
        RequestDelta(1, [SequenceDelta(0, [])], False),
        RequestDelta(1, [SequenceDelta(0, [7]), SequenceDelta(1, [8])], False),
        RequestDelta(1, [SequenceDelta(0, [9]), SequenceDelta(1, [7])], False),
        RequestDelta(1, [SequenceDelta(1, [6], "length")], True),
    )
    ends = [(sample.token_ids, sample.finish_reason) for sample in output.outputs]
    assert ends == [([7, 9], "stop"), ([8, 7, 6], "length")]
    assert output.finished


def test_samples_may_end_before_their_first_token() -> None:
    """As where a grammar rejects the first token of each."""
    request = request_state(SamplingParams(n=2, detokenize=False))
    ended = [SequenceDelta(index, [], "length") for index in range(2)]
    output = last_output(request, RequestDelta(1, ended, True, error="stopped after 0 tokens"))
    assert [(sample.index, sample.finish_reason) for sample in output.outputs] == [(0, "length"), (1, "length")]


def test_a_request_that_ends_before_its_prompt_is_computed_has_one_output() -> None:
    request = request_state(SamplingParams(n=3, detokenize=False))
    request.abort()
    assert [sample.finish_reason for sample in last_output(request).outputs] == ["abort"]

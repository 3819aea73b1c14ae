"""What callers receive of a request's samples: all of them, or what is new since the last time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.common.batch import PoolSpec
from quire.common.lora import KnownAdapter
from quire.common.outputs import CompletionOutput
from quire.common.params import SamplingParams
from quire.engine.requests.output import OutputBuilder, SampleOutput, places_from, text_of
from quire.engine.requests.pooling import PromptPooling

PARAMS = SamplingParams(stop_token_ids=[7])
ADAPTER = KnownAdapter("name", 4, "/folder", "digest", 1, "given")


class Letters:
    """A detokenizer with a letter for each token; while more may come, the last letter is undecided."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def append(self, token_id: int) -> str | None:
        self.text += chr(token_id)
        return None

    def fork(self) -> Letters:
        return Letters(self.text)

    def stable_text(self, is_finished: bool) -> str:
        return self.text if is_finished else self.text[:-1]


def sample(text: str = "", drafts: tuple[int, ...] = (), **given: Any) -> SampleOutput:
    detokenizer: Any = Letters()
    made = SampleOutput(PARAMS, frozenset({9}), detokenizer, **given)
    for letter in text:
        assert not made.append(ord(letter))
    made.accepted_drafts += drafts
    return made


@pytest.mark.parametrize(("token_id", "stop_reason"), [(9, None), (7, 7)])
def test_a_sample_ends_with_a_stop_token(token_id: int, stop_reason: int | None) -> None:
    one = sample("ab")
    assert (one.finish_reason, one.stop_reason) == (None, None)
    assert one.append(token_id)
    assert (one.finish_reason, one.stop_reason) == ("stop", stop_reason)
    assert one.to_completion() == CompletionOutput(0, "ab", [97, 98, token_id], "stop", stop_reason)


def test_the_whole_output_is_returned_unless_what_is_new_is_wanted() -> None:
    one = sample("abc")
    assert one.to_completion() == CompletionOutput(0, "ab", [97, 98, 99])
    assert one.to_completion(delta=True) == CompletionOutput(0, "ab", [97, 98, 99])
    assert not one.has_emitted_end
    one.append(ord("d"))
    one.finish_reason = "length"
    assert one.to_completion() == CompletionOutput(0, "abcd", [97, 98, 99, 100], "length")
    assert one.to_completion(delta=True) == CompletionOutput(0, "cd", [100], "length")
    assert one.has_emitted_end
    assert one.to_completion(delta=True) == CompletionOutput(0, "", [], "length")


def test_without_a_detokenizer_there_is_no_text() -> None:
    one = SampleOutput(PARAMS)
    one.append(5)
    assert one.to_completion() == CompletionOutput(0, "", [5])


def test_accepted_drafts_are_counted_from_the_tokens_that_are_returned() -> None:
    one = sample("abcde", (1, 2, 4))
    one.predicted_drafts += [2, 4]
    from_start = [places_from(one.accepted_drafts, start) for start in (0, 1, 2, 3, 5)]
    assert from_start == [[1, 2, 4], [0, 1, 3], [0, 2], [1], []]
    made = one.to_completion(delta=True)
    assert (made.accepted_drafts, made.predicted_drafts) == ([1, 2, 4], [2, 4])
    one.append(ord("f"))
    one.append(ord("g"))
    one.accepted_drafts.append(6)
    one.predicted_drafts.append(6)
    made = one.to_completion(delta=True)
    assert (made.accepted_drafts, made.predicted_drafts) == ([1], [1])
    assert one.to_completion().accepted_drafts == [1, 2, 4, 6]


def test_a_fork_goes_on_by_itself_and_has_emitted_nothing() -> None:
    one = sample("ab", (1,))
    one.to_completion(delta=True)
    other = one.fork(3)
    other.append(ord("c"))
    other.accepted_drafts.append(2)
    other.predicted_drafts.append(2)
    assert one.predicted_drafts == []
    assert (one.token_ids, one.accepted_drafts) == ([97, 98], [1])
    assert other.to_completion(delta=True) == CompletionOutput(3, "ab", [97, 98, 99])
    assert other.accepted_drafts == [1, 2]
    assert one.to_completion() == CompletionOutput(0, "a", [97, 98])


def test_an_output_has_the_prompt_the_adapter_and_what_was_pooled() -> None:
    pooling = PromptPooling(PoolSpec("embed"), 2, is_whole=False)
    pooling.result = np.ones(3, np.float32)
    builder = OutputBuilder("id", [5, 6], PARAMS, 1.5, "text", pooling=pooling, adapter=ADAPTER)
    output = builder.to_output([sample("ab")])
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("id", "text", [5, 6])
    assert (output.finished, output.lora_request, output.error) == (False, ADAPTER.request, None)
    assert output.metrics is not None
    assert output.metrics.arrival_time == 1.5
    assert output.pooled is pooling.result


def test_an_output_without_these_has_none_of_them() -> None:
    output = OutputBuilder("id", [5, 6], PARAMS, 1.5).to_output([sample("ab")])
    assert (output.prompt, output.lora_request, output.pooled) == (None, None, None)


def test_of_a_failed_request_the_error_and_how_each_sample_ended_is_returned() -> None:
    builder = OutputBuilder("id", [5], PARAMS, 1.5, "text", adapter=ADAPTER, error="broken")
    samples = [sample("ab", index=index, finish_reason="abort") for index in range(2)]
    output = builder.to_failed_output(samples)
    assert output.outputs == [CompletionOutput(index, "", [], "abort") for index in range(2)]
    assert (output.error, output.finished, output.prompt) == ("broken", True, "text")
    assert output.lora_request == ADAPTER.request


def test_the_text_that_tokens_would_add_is_made_without_adding_them() -> None:
    detokenizer: Any = Letters("a")
    assert text_of(detokenizer, [98, 99]) == "abc"
    assert detokenizer.text == "a"
    assert text_of(None, [98]) == ""

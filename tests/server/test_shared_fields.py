"""The types that bodies of several endpoints share: what is copied, counted and measured."""

import pytest

from quire.common.outputs import RequestMetrics
from quire.server.api.shared.fields import (
    ChatExtensions,
    CompletionTokensDetails,
    Prediction,
    PromptTokensDetails,
    SamplingFields,
    StreamOptions,
    TextPart,
    Timings,
    Usage,
    fields_of,
)


def test_the_fields_that_were_set_are_copied_even_where_they_are_zero():
    assert fields_of(ChatExtensions()) == {}
    request = ChatExtensions(seed=0, top_k=4, cache_salt="", ignore_eos=False, chat_template_kwargs={"a": 1})
    assert fields_of(request) == {
        "seed": 0, "top_k": 4, "cache_salt": "", "ignore_eos": False, "chat_template_kwargs": {"a": 1},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "at_the_end", "in_every_chunk"),
    [
        (None, False, False),
        (StreamOptions(), False, False),
        (StreamOptions(include_usage=True), True, False),
        (StreamOptions(continuous_usage_stats=True), False, False),
        (StreamOptions(include_usage=True, continuous_usage_stats=True), True, True),
    ],
)
def test_a_stream_has_the_usage_that_its_options_ask_for(options, at_the_end, in_every_chunk):
    request = SamplingFields(stream_options=options)
    assert request.includes_usage is at_the_end
    assert request.continuous_usage is in_every_chunk


def test_the_usage_adds_up():
    assert Usage.of(10, 5, 4) == Usage(10, 5, 15, PromptTokensDetails(cached_tokens=4))
    details = CompletionTokensDetails(accepted_prediction_tokens=2, rejected_prediction_tokens=1)
    assert Usage.of(10, 5, 4, (2, 1)) == Usage(10, 5, 15, PromptTokensDetails(4), details)


@pytest.mark.parametrize("content", ["a text", [TextPart(type="text", text="a "), TextPart(type="text", text="text")]])
def test_the_parts_of_a_prediction_are_one_text(content):
    assert Prediction(type="content", content=content).text == "a text"


def test_timings_are_the_times_between_events_in_microseconds():
    metrics = RequestMetrics(2.0, 3.5, 5.75, 10.0000004, num_preemptions=3)
    assert Timings.of(metrics) == Timings(1.5, 2.25, 4.25, 8.0, num_preemptions=3)
    assert Timings.of(RequestMetrics(2.0, first_scheduled_time=2.1234564)) == Timings(0.123456, None, None, None)
    assert Timings.of(RequestMetrics(2.0, finished_time=5.0)) == Timings(None, None, None, 3.0)
    assert Timings.of(RequestMetrics(2.0, drafts={"a": (4, 1), "b": (3, 2)})).num_drafts == 7
    assert Timings.of(RequestMetrics(2.0, drafts={"a": (4, 1), "b": (3, 2)})).num_accepted_drafts == 3
    assert Timings.of(None) is None

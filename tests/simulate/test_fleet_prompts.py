"""Prompts that another process makes for a simulated fleet."""

import multiprocessing
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from quire.common.errors import ConfigError, QuireError
from quire.interfaces.simulate.fake_model import FakeModel
from quire.interfaces.simulate.fleet.events import Deaths
from quire.interfaces.simulate.fleet.prompts import MOST_AHEAD, PIECE, prompts_ahead
from quire.interfaces.simulate.fleet.report import fleet_report
from quire.interfaces.simulate.fleet.simulator import FleetSimulator
from quire.interfaces.simulate.trace import TraceRequest, read_trace
from quire.interfaces.simulate.workloads import synthetic_trace

from .helpers import make

MIXED_LINES = """
{"arrival_s": 0, "prompt_len": 60, "output_len": 20, "prefix_group": 1, "prefix_len": 40, "session": 1}
{"arrival_s": 0.5, "prompt_len": 30, "output_len": 8, "n": 4}
{"arrival_s": 0.6, "prompt_len": 50, "output_len": 90, "prefix_group": 1, "prefix_len": 40}
{"arrival_s": 0.7, "prompt_len": 3000, "output_len": 5}
{"arrival_s": 0.8, "prompt_len": 25, "output_len": 12, "beam_width": 3}
{"arrival_s": 1, "prompt_len": 10, "output_len": 20, "session": 1, "think_s": 1}
{"arrival_s": 2, "prompt_len": 1, "output_len": 1}
"""


def mixed_trace() -> Iterator[TraceRequest]:
    return synthetic_trace(7, 150, requests_per_s=25.0)


def long_answers() -> Iterator[TraceRequest]:
    return iter([TraceRequest(0.0, 20, MOST_AHEAD + 40)])


def ends_abruptly() -> Iterator[TraceRequest]:
    yield TraceRequest(0.0, 20, 4)
    raise SystemExit(1)


def fleet(**options):
    deaths = Deaths(((1.5, 0), (4.0, 1)))
    return FleetSimulator(partial(make, **{"num_blocks": 160, **options}), 3, deaths=deaths, start_s=1.0)


@pytest.mark.parametrize(
    ("make_trace", "options"),
    [
        (mixed_trace, {}),
        (mixed_trace, {"acceptance": 0.7}),
        (mixed_trace, {"num_blocks": 40, "num_host_blocks": 60}),
        (long_answers, {"num_blocks": 400}),
    ],
    ids=["preemptions and deaths", "drafts", "swaps", "long answers"],
)
def test_a_report_is_the_same_with_prompts_from_another_process(make_trace, options):
    alone, helped = fleet(**options), fleet(**options)
    alone.run(make_trace())
    helped.run_with_helper(make_trace)
    assert fleet_report(helped) == fleet_report(alone)


def test_sessions_samples_and_beams_are_the_same_too(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text(MIXED_LINES)
    alone, helped = fleet(), fleet()
    alone.run(read_trace(path))
    helped.run_with_helper(partial(read_trace, path))
    assert fleet_report(helped) == fleet_report(alone)
    assert fleet_report(helped)["ignored"] == 1


@pytest.mark.parametrize("num_right", [0, 7, PIECE])
def test_an_error_in_the_trace_is_that_of_the_other_process(num_right: int, tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 2}\n' * num_right + "nonsense\n")
    with pytest.raises(ConfigError, match=f"line {num_right + 1}"):
        fleet().run_with_helper(partial(read_trace, path))


def test_a_process_that_ends_too_early_is_an_error():
    with pytest.raises(QuireError, match="ended too early"):
        fleet().run_with_helper(ends_abruptly)


def test_the_process_ends_with_the_simulation():
    with prompts_ahead(mixed_trace, b"key", 16) as prompts:
        assert next(iter(prompts.trace)) == next(mixed_trace())
        assert len(multiprocessing.active_children()) == 1
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("wrong", [None, 0, 5, 19])
def test_a_sequence_with_other_tokens_than_expected_draws_what_the_model_would(wrong):
    prompt = [3, 1, 4, 1, 5]

    def draw(expected):
        history = list(prompt)
        model = FakeModel(lambda seq_id: history)
        if expected is not None:
            model.expect(0, expected, len(prompt))
        for num in (1, 3, 1, 16):
            history.extend(model.next_tokens(0, len(history) - 1, history[-1], 0, num))
            if wrong is not None and len(history) - len(prompt) > wrong:
                history[-1] = 7  # what was drawn has been lost
        return history

    right = draw(None)
    unchanged = FakeModel(lambda seq_id: prompt).next_tokens(0, 4, 5, 0, 21)
    assert draw([*prompt, *unchanged]) == right
    if wrong is None:
        assert right == [*prompt, *unchanged]

"""Interrupts at chosen lines of a step: Ctrl-C loses nothing, and anything else loses nothing or breaks the engine."""

import signal
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import quire
from quire import EngineBrokenError, InvalidParamsError, LLMEngine, RequestOutput
from quire.engine.step.interrupts import interrupt_deferred

from .failing import add, add_beams, check_nothing_is_held, make_engine

pytestmark = pytest.mark.usefixtures("quiet", "interruptible")

SOURCES = str(Path(quire.__file__).parent)
STEPS_LIMIT = 3000
RETURN = LLMEngine.step.__code__, max(line or 0 for *_, line in LLMEngine.step.__code__.co_lines())
"""The only line before which Python looks for no interrupt, because no call or jump is in between."""


class Alarm(BaseException):
    """As another thread may raise it here."""


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def alarm() -> None:
    raise Alarm


class Interrupts:
    """Counts the lines of Quire that run in steps, and calls `act` at line `first` and each `every` further ones, but
    once in a step."""

    def __init__(self, act: Callable[[], None] | None = None, first: int = 0, every: int = 1 << 60) -> None:
        self.num_lines = self.num_interrupts = 0
        self._act, self._first, self._every = act, first, every
        self._may_act = False

    def step(self, engine: LLMEngine) -> list[RequestOutput]:
        self._may_act = self._act is not None
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            return engine.step()
        finally:
            sys.settrace(before)

    def _call(self, frame: object, event: str, arg: object) -> object:
        return self._line if frame.f_code.co_filename.startswith(SOURCES) else None

    def _line(self, frame: object, event: str, arg: object) -> object:
        if event == "line" and (frame.f_code, frame.f_lineno) != RETURN:
            self.num_lines += 1
            if self._may_act and self.num_lines % self._every == self._first:
                self._may_act = False
                self.num_interrupts += 1
                self._act()
        return self._line


def crowded(num_host_blocks: int, **arguments: object) -> LLMEngine:
    """More than the cache holds, with every kind of output."""
    engine = make_engine(num_blocks=9, num_host_blocks=num_host_blocks, **arguments)
    for i, kind in enumerate(["delta", "cumulative", "final_only", "delta"]):
        add(engine, str(i), [3, 4, 5, i % 2 + 3, 5, 6, i], max_tokens=9 - i, n=1 + i % 2, output_kind=kind)
    add_beams(engine, "beams", [3, 4, 5, 3, 5], width=2, max_tokens=4)
    return engine


SCENES: dict[str, Callable[[], LLMEngine]] = {
    "swapping": lambda: crowded(20, preemption_mode="swap"),
    "recomputing": lambda: crowded(0, preemption_mode="recompute"),
    "chunks": lambda: crowded(3, max_num_batched_tokens=8, max_num_seqs=4),
}


class Received:
    """What a program has of the outputs of all requests."""

    def __init__(self, engine: LLMEngine) -> None:
        groups = engine._groups.items()
        self._are_deltas = {name: group.params.output_kind == "delta" for name, group in groups}
        self.token_ids: dict[tuple[str, int], list[int]] = defaultdict(list)
        self.finished: list[str] = []

    def add(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.error is None
            for sample in output.outputs:
                key = output.request_id, sample.index
                before = self.token_ids[key] if self._are_deltas[output.request_id] else []
                self.token_ids[key] = before + sample.token_ids
            self.finished += [output.request_id] * output.finished


def run(engine: LLMEngine, interrupts: Interrupts) -> Received:
    """As a program that goes on after an interrupt. Raises EngineBrokenError."""
    received = Received(engine)
    for _ in range(STEPS_LIMIT):
        if not engine.has_unfinished_requests():
            break
        try:
            received.add(interrupts.step(engine))
        except KeyboardInterrupt:
            engine.requests.check_integrity()
        except Alarm:
            received.add(engine.step())
            engine.requests.check_integrity()
    check_nothing_is_held(engine)
    return received


@pytest.fixture(scope="module", params=SCENES)
def scene(request: pytest.FixtureRequest) -> tuple[Callable[[], LLMEngine], Received, int]:
    """An engine with requests, what they get where nothing interrupts, and how many lines that takes."""
    engine, interrupts = SCENES[request.param](), Interrupts()
    received = run(engine, interrupts)
    assert engine.stats().num_preemptions
    return SCENES[request.param], received, interrupts.num_lines


@pytest.mark.sampled(6)
@pytest.mark.parametrize("every", [251, 397, 499, 601, 1013, 2003])
def test_ctrl_c_at_any_line_of_a_step_loses_nothing(scene, every):
    make, expected, _ = scene
    interrupts = Interrupts(ctrl_c, every // 2, every)
    received = run(make(), interrupts)
    assert interrupts.num_interrupts >= 5
    assert received.token_ids == expected.token_ids
    assert sorted(received.finished) == sorted(expected.finished)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("part", range(24))
def test_an_exception_from_outside_loses_nothing_or_breaks_the_engine(scene, part):
    make, expected, num_lines = scene
    interrupts = Interrupts(alarm, num_lines * (2 * part + 1) // 48)
    try:
        received = run(make(), interrupts)
    except EngineBrokenError as error:
        assert "a step was interrupted before its end" in str(error)  # noqa: PT017
    else:
        assert received.token_ids == expected.token_ids
    assert interrupts.num_interrupts == 1


@pytest.fixture
def interrupted() -> LLMEngine:
    """An engine that has the outputs of a step to return: those of a request that has ended, and of another one."""
    engine = make_engine()
    add(engine, "ended", [3] * 3, max_tokens=1)
    add(engine, "runs", [4] * 3, max_tokens=3)
    engine.executor.fails = lambda batch: ctrl_c()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    engine.executor.fails = lambda batch: False
    return engine


def test_the_next_step_returns_what_an_interrupted_one_had_to_return(interrupted):
    num_tokens = [[len(output.outputs[0].token_ids) for output in interrupted.step()] for _ in range(2)]
    assert num_tokens == [[1, 1, 2], [3]]
    check_nothing_is_held(interrupted)


def test_the_last_output_counts_as_a_request_to_be_stepped(interrupted):
    interrupted.abort_request("runs")
    assert interrupted.has_unfinished_requests()
    assert [output.request_id for output in interrupted.step()] == ["ended"]
    assert not interrupted.has_unfinished_requests()


def test_aborted_requests_have_no_outputs_of_an_interrupted_step(interrupted):
    assert interrupted.abort_request("ended").outputs[0].finish_reason == "length"
    assert interrupted.abort_request("ended") is None
    assert interrupted.abort_request("runs").outputs[0].finish_reason == "abort"
    assert not interrupted.has_unfinished_requests()
    assert interrupted.step() == []


def test_a_broken_engine_returns_what_an_interrupted_step_had_to_return(interrupted):
    interrupted.abort_request("runs")
    with pytest.raises(Alarm):
        Interrupts(alarm, 30).step(interrupted)
    assert [output.request_id for output in interrupted.step()] == ["ended"]
    with pytest.raises(EngineBrokenError):
        interrupted.step()


def test_an_engine_interrupted_at_its_last_output_is_to_be_stepped_again(monkeypatch):
    engine = make_engine()
    add(engine, "a", [3] * 3, max_tokens=1)
    monkeypatch.setattr(engine.grammars, "forget", lambda group: alarm())
    with pytest.raises(Alarm):
        engine.step()
    assert engine.has_unfinished_requests()
    with pytest.raises(EngineBrokenError):
        engine.step()
    assert not engine.has_unfinished_requests()


def test_ctrl_c_in_the_middle_of_adding_or_ending_a_request_waits(monkeypatch):
    engine = make_engine()
    with monkeypatch.context() as patch:
        patch.setattr(engine._slots, "use", lambda group: ctrl_c())
        with pytest.raises(KeyboardInterrupt):
            add(engine, "a", [3] * 3)
    assert len(engine.step()) == 1
    with monkeypatch.context() as patch:
        patch.setattr(engine.blocks, "forget", lambda seq_id, forget=engine.blocks.forget: (ctrl_c(), forget(seq_id)))
        with pytest.raises(KeyboardInterrupt):
            engine.abort_request("a")
    check_nothing_is_held(engine)
    assert not engine.has_unfinished_requests()


def test_a_delayed_ctrl_c_is_not_lost_where_the_block_ends_with_an_error():
    @interrupt_deferred()
    def fail() -> None:
        ctrl_c()
        raise InvalidParamsError("only one request is wrong, and the program goes on")

    with pytest.raises(KeyboardInterrupt):
        fail()

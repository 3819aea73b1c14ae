"""When requests that fail end alone, and when they end the engine."""

from itertools import count

import pytest

from quire import LLM, SamplingParams
from quire.common.errors import EngineBrokenError
from quire.common.faults import Fault, inject
from quire.engine.step.containment import MAX_CONSECUTIVE_FAILURES

from .failing import add, fail_with, make_engine, requests_of, run, token_ids

pytestmark = pytest.mark.usefixtures("quiet")


def test_an_engine_of_which_every_request_fails_is_broken():
    engine = make_engine()
    for i in range(MAX_CONSECUTIVE_FAILURES + 3):
        add(engine, str(i), [i + 3] * 3)
    engine.executor.fails = lambda batch: bool(batch.sequences)
    outputs = (output for _ in count() for output in engine.step())
    with pytest.raises(EngineBrokenError, match="without a step in between that succeeded"):
        raise AssertionError(f"a request is blamed for the engine: {next(outputs)}")
    with pytest.raises(EngineBrokenError):
        engine.step()
    assert len(engine._groups) == MAX_CONSECUTIVE_FAILURES + 3
    assert engine.abort_request("0").outputs[0].finish_reason == "abort"


@pytest.mark.parametrize("num", [1, MAX_CONSECUTIVE_FAILURES])
def test_requests_of_an_engine_that_has_no_others_are_ended_when_all_fail(num):
    engine = make_engine()
    for i in range(num):
        add(engine, str(i), [i + 3] * 3)
    engine.executor.fails = lambda batch: bool(batch.sequences)
    assert all(output.error for output in run(engine).values())
    engine.executor.fails = lambda batch: False
    add(engine, "after", [3] * 3)
    assert run(engine)["after"].error is None


@pytest.mark.parametrize("good_at", ["first", "last"])
def test_one_good_request_is_enough_to_distinguish_many_bad_ones_from_a_broken_engine(good_at):
    engine, bad = make_engine(), [f"bad {i}" for i in range(4 * MAX_CONSECUTIVE_FAILURES)]
    for name in ["good", *bad] if good_at == "first" else [*bad, "good"]:
        add(engine, name, [3 + len(engine._groups)] * 3, max_tokens=15)
    fail_with(engine, bad)
    assert {name for name, output in run(engine).items() if output.error is None} == {"good"}


@pytest.mark.parametrize("num_candidates", [1, 2, 4])
@pytest.mark.parametrize("stays_bad", [True, False])
def test_a_candidate_while_all_fails_ends_only_if_it_still_fails_when_others_do_not(num_candidates, stays_bad):
    engine, expected = make_engine(), make_engine()
    for name in "abcd":
        add(engine, name, [ord(name)] * 3)
        add(expected, name, [ord(name)] * 3)
    engine.executor.fails = lambda batch: True
    while len(engine._isolator.candidates) < num_candidates:
        assert engine.step() == []
    bad = engine._isolator.candidates[0].request_id
    engine.executor.fails = lambda batch: stays_bad and bad in requests_of(engine, batch)
    outputs, wanted = run(engine), run(expected)
    assert [name for name, output in outputs.items() if output.error] == ([bad] if stays_bad else [])
    for name in outputs.keys() - ({bad} if stays_bad else set()):
        assert token_ids(outputs[name]) == token_ids(wanted[name])


def test_a_candidate_request_can_be_aborted():
    engine = make_engine()
    for name in "abcd":
        add(engine, name, [ord(name)] * 3)
    engine.executor.fails = lambda batch: True
    while not engine._isolator.candidates:
        engine.step()
    (candidate,) = engine._isolator.candidates
    told = engine.abort_request(candidate.request_id)
    assert (told.error, told.outputs[0].finish_reason) == (None, "abort")
    engine.executor.fails = lambda batch: False
    assert run(engine).keys() == {*"abcd"} - {candidate.request_id}


def test_requests_that_fail_alone_do_not_break_an_engine_that_others_use():
    engine = make_engine()
    for i in range(3 * MAX_CONSECUTIVE_FAILURES):
        add(engine, f"bad {i}", [i + 3] * 3)
        add(engine, f"good {i}", [i + 3] * 4)
    fail_with(engine, [f"bad {i}" for i in range(3 * MAX_CONSECUTIVE_FAILURES)])
    outputs = run(engine)
    assert {name for name, output in outputs.items() if output.error} == {
        f"bad {i}" for i in range(3 * MAX_CONSECUTIVE_FAILURES)
    }


def test_steps_that_fail_before_anything_is_planned_break_it_too():
    engine = make_engine()
    add(engine, "a", [3])
    with inject(Fault("step.start", times=3)):
        assert [engine.step() for _ in range(3)] == [[], [], []]
    assert run(engine)["a"].error is None
    add(engine, "b", [3])
    with inject(Fault("step.start", times=None)), pytest.raises(EngineBrokenError):
        run(engine)


@pytest.mark.parametrize(
    ("owner", "method"),
    [("scheduler", "_new_plan"), ("requests", "settle"), ("blocks", "publish"), ("requests", "revert")],
)
def test_a_failure_in_block_accounting_breaks_the_engine(monkeypatch, owner, method):
    engine = make_engine()
    for i in range(3):
        add(engine, str(i), [i + 3] * 3)
    engine.step()
    engine.executor.fails = lambda batch: method == "revert"

    def fail(*_: object) -> None:
        raise ValueError("planted bug")

    monkeypatch.setattr(getattr(engine, owner), method, fail)
    with pytest.raises(EngineBrokenError, match="accounting is inconsistent: ValueError: planted bug") as raised:
        run(engine)
    assert isinstance(raised.value.__cause__, ValueError)


def test_an_interrupt_amid_block_accounting_breaks_the_engine(monkeypatch):
    llm = LLM.from_engine(make_engine())

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine.requests, "settle", interrupted)
    params = SamplingParams(temperature=0, max_tokens=4, detokenize=False)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[3] * 3, [4] * 3], params, use_tqdm=False)
    monkeypatch.undo()
    with pytest.raises(EngineBrokenError, match="a step was interrupted before its end"):
        llm.generate([3] * 3, params, use_tqdm=False)


@pytest.mark.parametrize("leaks", ["blocks", "a sequence"])
def test_an_ended_request_that_leaves_something_behind_breaks_the_engine(monkeypatch, leaks):
    engine = make_engine()
    for i in range(3):
        add(engine, str(i), [i + 3] * 3)
    engine.step()
    name, owner = ("free", engine.blocks) if leaks == "blocks" else ("_forget", engine.requests)
    monkeypatch.setattr(owner, name, lambda *_: None)
    with inject(Fault("commit.sequence", after=1)), pytest.raises(EngineBrokenError, match="AssertionError"):
        run(engine)


def test_llm_returns_what_failed_and_raises_only_for_a_broken_engine():
    llm = LLM.from_engine(make_engine())
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    expected = llm.generate([[3] * 3, [4] * 3, [5] * 3], params, use_tqdm=False)
    owners = llm.engine.requests.owners
    llm.engine.executor.fails = lambda batch: any(owners[s.seq_id][1].token_ids[0] == 4 for s in batch.sequences)
    good, bad, other = llm.generate([[3] * 3, [4] * 3, [5] * 3], params, use_tqdm=False)
    assert [token_ids(good), token_ids(other)] == [token_ids(expected[0]), token_ids(expected[2])]
    assert "RuntimeError" in bad.error
    assert "RuntimeError" in llm.generate([4] * 3, params, use_tqdm=False)[0].error
    llm.engine.executor.fails = lambda batch: True
    with pytest.raises(EngineBrokenError):
        llm.generate([[i + 3] * 3 for i in range(9)], params, use_tqdm=False)
    assert not llm.engine.has_unfinished_requests()
    with pytest.raises(EngineBrokenError):
        llm.generate([3] * 3, params, use_tqdm=False)

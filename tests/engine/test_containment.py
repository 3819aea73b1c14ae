"""A request in whose work something fails ends alone; no other loses a token or a block, and none fails for another."""

import logging
from collections.abc import Callable
from itertools import count

import numpy as np
import pytest

from quire import LLM, LLMEngine, RequestError, SamplingParams
from quire.common.errors import EngineBrokenError, RequestFailedError
from quire.common.faults import Fault, inject
from quire.engine.step.containment import MAX_CONSECUTIVE_FAILURES
from quire.text.tokenizer.detokenizer import IncrementalDetokenizer

from .failing import add, add_beams, check_nothing_is_held, fail_with, make_engine, requests_of, run, token_ids

COMMON = [5, 6, 7, 8, 5, 6, 7, 8]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)


def singles(engine: LLMEngine) -> None:
    for i in range(9):
        add(engine, str(i), [i + 3] * (i + 1))


def joined(engine: LLMEngine) -> None:
    """All begin with the same two blocks, which the first computes for the others in the same step."""
    for i in range(6):
        add(engine, str(i), [*COMMON, i + 3])


def samples(engine: LLMEngine) -> None:
    for i in range(4):
        add(engine, str(i), [i + 3] * 6, n=1 + i % 3)


def beams(engine: LLMEngine) -> None:
    for i in range(3):
        add_beams(engine, str(i), [i + 3] * 6)
    add(engine, "3", [9] * 5)


def crowded(engine: LLMEngine) -> None:
    """More than the cache holds."""
    for i in range(5):
        add(engine, str(i), [i + 3] * 7, max_tokens=10, n=1 + i % 2)


ENGINES: dict[str, tuple[Callable[[LLMEngine], None], dict[str, object]]] = {
    "singles": (singles, {}),
    "chunks": (singles, {"max_num_batched_tokens": 8, "max_num_seqs": 4}),
    "joined": (joined, {}),
    "samples": (samples, {}),
    "beams": (beams, {}),
    "swapping": (crowded, {"num_blocks": 8, "num_host_blocks": 30, "preemption_mode": "swap"}),
    "recomputing": (crowded, {"num_blocks": 8, "preemption_mode": "recompute"}),
    "fair": (crowded, {"num_blocks": 8, "num_host_blocks": 6, "scheduling_policy": "fair"}),
    "by prefix": (joined, {"num_blocks": 9, "scheduling_policy": "prefix"}),
    "uncached": (joined, {"enable_prefix_caching": False}),
}


@pytest.fixture(params=ENGINES)
def scene(request: pytest.FixtureRequest) -> tuple[Callable[[LLMEngine], None], Callable[[], LLMEngine]]:
    fill, arguments = ENGINES[request.param]

    def make() -> LLMEngine:
        engine = make_engine(**arguments)
        fill(engine)
        return engine

    return make


@pytest.mark.sampled(4)
@pytest.mark.parametrize("from_step", [0, 4])
@pytest.mark.parametrize("bad", [("0",), ("3",), ("1", "2")])
def test_a_request_that_makes_steps_fail_ends_and_the_others_do_not_notice(scene, bad, from_step):
    expected = run(scene())
    engine = scene()
    fail_with(engine, bad, from_step)
    outputs = run(engine)
    failed = {name for name, output in outputs.items() if output.error is not None}
    assert failed <= set(bad)
    assert failed == set(bad) or from_step, "who was finished before did not fail"
    for name in failed:
        assert outputs[name].error == f"request {name!r} failed when it was executed: RuntimeError"
        assert {sample.finish_reason for sample in outputs[name].outputs} <= {"abort", "length"}
    for name in outputs.keys() - failed:
        assert token_ids(outputs[name]) == token_ids(expected[name])
    assert engine.executor.num_failures > 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("every", [2, 3, 5])
def test_a_temporary_failure_ends_no_request(scene, every):
    """Each second, third or fifth step fails: never the same one twice."""
    expected = run(scene())
    engine = scene()
    engine.executor.fails = lambda batch: batch.step % every == 0
    outputs = run(engine)
    assert engine.executor.num_failures > 0
    assert {name: token_ids(output) for name, output in outputs.items()} == {
        name: token_ids(output) for name, output in expected.items()
    }
    assert not any(output.error for output in outputs.values())


def test_two_that_fail_only_together_both_finish():
    expected, engine = make_engine(), make_engine()
    singles(expected)
    singles(engine)
    engine.executor.fails = lambda batch: requests_of(engine, batch) >= {"2", "3"}
    outputs, wanted = run(engine), run(expected)
    assert engine.executor.num_failures > 2
    for name, output in outputs.items():
        assert output.error is None
        assert token_ids(output) == token_ids(wanted[name])


def test_the_one_is_found_in_few_steps_while_the_others_wait():
    engine = make_engine(num_blocks=400)
    for i in range(64):
        add(engine, str(i), [i % 40 + 3] * 3)
    engine.step()
    fail_with(engine, ["41"])
    num_steps = next(i for i in range(1, 100) if any(output.error for output in engine.step()))
    assert num_steps <= 2 + 6 + 1 + 1 + 1, "twice all, then halves, the others, and it alone again"
    assert all(output.error is None for output in run(engine).values())


# Broken engines


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


# Planning


@pytest.mark.sampled(8)
@pytest.mark.parametrize("point", ["blocks.allocate", "blocks.append", "blocks.swap_out", "blocks.swap_in"])
@pytest.mark.parametrize("after", range(4))
def test_a_request_that_cannot_be_planned_ends(scene, point, after):
    expected = run(scene())
    engine = scene()
    names = {seq_id: group.request_id for seq_id, (group, _) in engine.requests.owners.items()}
    with inject(Fault(point, after=after)) as injected:
        outputs = run(engine)
    failed = {name for name, output in outputs.items() if output.error is not None}
    assert len(failed) == injected.num_fired
    for name in failed:
        assert outputs[name].error == f"request {name!r} failed when it was planned: RuntimeError"
        assert names.get(injected.subjects[0], name) == name
    for name in outputs.keys() - failed:
        assert token_ids(outputs[name]) == token_ids(expected[name])


def test_a_request_that_can_never_be_planned_leaves_the_others_alone():
    engine = make_engine(num_blocks=8, num_host_blocks=30, preemption_mode="swap")
    crowded(engine)
    victim = engine._groups["2"].seqs[0].seq_id
    with inject(Fault("blocks.swap_out", subject=victim, times=None)) as injected:
        outputs = run(engine)
    assert injected.num_fired == 1
    assert [name for name, output in outputs.items() if output.error] == ["2"]


def test_a_request_that_ends_in_planning_is_returned():
    """No other request is left whose step would return it."""
    engine = make_engine(num_blocks=6)
    add(engine, "a", [3] * 5, max_tokens=9)
    with inject(Fault("blocks.append", after=1)):
        assert "when it was planned" in run(engine)["a"].error
    engine.pin_prefix([3] * 4)
    add(engine, "b", [4] * 4, max_tokens=19)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert "do not fit" in outputs[-1].error


# Commit and outputs


@pytest.mark.sampled(4)
@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_request_whose_tokens_cannot_be_taken_ends(scene, after):
    expected = run(scene())
    engine = scene()
    with inject(Fault("commit.sequence", after=after)) as injected:
        outputs = run(engine)
    failed = [output for output in outputs.values() if output.error is not None]
    assert len(failed) == injected.num_fired == 1
    assert failed[0].error == f"request {failed[0].request_id!r} failed when its tokens were added: RuntimeError"
    for name in outputs.keys() - {failed[0].request_id}:
        assert token_ids(outputs[name]) == token_ids(expected[name])


class Unruly:
    """A mask, and a place in a grammar, that fails after so many tokens."""

    error = None
    is_finished = may_end = False

    def __init__(self, num_left: int) -> None:
        self.num_left = num_left

    def fork(self) -> "Unruly":
        return Unruly(self.num_left)

    def mask(self) -> np.ndarray:
        return np.full(256, -1, np.int32)

    def forced_tokens(self) -> list[int]:
        return []

    def advance(self, token_id: int) -> bool:
        self.num_left -= 1
        if self.num_left < 0:
            raise RuntimeError("planted failure")
        return True


@pytest.mark.parametrize("kind", ["single", "samples", "beams"])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_a_grammar_that_raises_ends_its_request(kind, num_tokens):
    engine, expected = make_engine(), make_engine()
    for made in (engine, expected):
        add(made, "before", [3] * 5)
        if kind == "beams":
            add_beams(made, "bad", [4] * 5)
        else:
            add(made, "bad", [4] * 5, n=3 if kind == "samples" else 1)
        add(made, "behind", [5] * 5)
    engine._groups["bad"].seqs[0].grammar = Unruly(num_tokens)
    outputs, wanted = run(engine), run(expected)
    assert outputs["bad"].error == "request 'bad' failed when its tokens were added: RuntimeError"
    for name in ("before", "behind"):
        assert token_ids(outputs[name]) == token_ids(wanted[name])
        assert outputs[name].error is None


def test_a_detokenizer_that_raises_ends_its_request(monkeypatch):
    """With stop strings text is made when tokens are taken, else when it is told."""
    engine = make_engine()
    add(engine, "bad", [3] * 3, detokenize=True, stop=["never comes"])
    add(engine, "good", [4] * 3, detokenize=True, stop=["never comes"])
    add(engine, "later", [5] * 3, detokenize=True)
    broken = {id(engine._groups[name].seqs[0].output.detokenizer) for name in ("bad", "later")}
    for method in ("append", "stable_text"):
        working = getattr(IncrementalDetokenizer, method)

        def fail(self, *args, working=working, method=method):
            if id(self) in broken and (method == "stable_text" or self._stops is not None):
                raise RuntimeError("planted failure")
            return working(self, *args)

        monkeypatch.setattr(IncrementalDetokenizer, method, fail)
    outputs = run(engine)
    assert [outputs[name].error for name in ("bad", "good", "later")] == [
        "request 'bad' failed when its output was made: RuntimeError",  # its text, of the tokens before that
        None,
        "request 'later' failed when its output was made: RuntimeError",
    ]
    assert outputs["good"].outputs[0].text
    assert outputs["later"].finished
    assert (outputs["later"].outputs[0].text, outputs["later"].outputs[0].finish_reason) == ("", "abort")


def test_a_request_whose_output_cannot_be_made_ends():
    engine = make_engine()
    for name in ("bad", "good"):
        add(engine, name, [3] * 3, output_kind="delta")
    with inject(Fault("output.make", subject="bad", after=2)):
        outputs = run(engine)
    assert outputs["bad"].error == "request 'bad' failed when its output was made: RuntimeError"
    assert outputs["bad"].finished
    assert outputs["good"].error is None


def test_committed_tokens_are_emitted_though_the_step_fails_afterwards():
    engine = make_engine()
    add(engine, "a", [3] * 3, output_kind="delta", max_tokens=2)
    with inject(Fault("step.end", times=2)) as injected:
        tokens = [token for _ in range(2) for output in engine.step() for token in output.outputs[0].token_ids]
    assert injected.num_fired == 2
    assert len(tokens) == 2
    check_nothing_is_held(engine)


# What comes in


def test_a_prompt_that_fails_to_be_read_fails_alone():
    llm = LLM.from_engine(make_engine())
    params = SamplingParams(temperature=0, max_tokens=4)
    with inject(Fault("tokenizer.encode", after=1, error="KeyError")):
        first, second, third = llm.generate(["a", "b", "c"], params, use_tqdm=False)
    assert [first.error, third.error] == [None, None]
    assert (second.outputs[0].finish_reason, second.prompt) == ("ignored", "b")
    assert second.error.endswith("failed when it was added: KeyError")
    with inject(Fault("tokenizer.encode")), pytest.raises(RequestFailedError, match="when it was added"):
        llm.generate("a", params, use_tqdm=False)
    with inject(Fault("tokenizer.encode", after=1)):
        told = llm.chat([[{"role": "user", "content": text}] for text in "abc"], params, use_tqdm=False)
    assert [output.error is None for output in told] == [True, False, True]
    with inject(Fault("tokenizer.encode", after=1)), pytest.raises(RequestFailedError):
        llm.score_tokens("a b", [" c", " d"])
    check_nothing_is_held(llm.engine)


def test_an_error_of_the_caller_remains_the_callers_error():
    engine = make_engine()
    with pytest.raises(RequestError) as raised:
        engine.add_request("a", [], SamplingParams())
    assert not isinstance(raised.value, RequestFailedError)

"""A request in whose work something fails ends alone; no other loses a token or a block, and none fails for another."""

import signal
from collections.abc import Callable

import numpy as np
import pytest

from quire import LLM, LLMEngine, RequestError, RequestOutput, SamplingParams
from quire.common.errors import RequestFailedError
from quire.common.faults import Fault, inject
from quire.text.tokenizer.detokenizer import IncrementalDetokenizer

from .failing import add, add_beams, check_nothing_is_held, fail_with, make_engine, requests_of, run, token_ids

pytestmark = pytest.mark.usefixtures("quiet")

COMMON = [5, 6, 7, 8, 5, 6, 7, 8]


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


@pytest.fixture(scope="module", params=ENGINES)
def scene(request: pytest.FixtureRequest) -> Callable[[], LLMEngine]:
    fill, arguments = ENGINES[request.param]

    def make() -> LLMEngine:
        engine = make_engine(**arguments)
        fill(engine)
        return engine

    return make


@pytest.fixture(scope="module")
def expected(scene: Callable[[], LLMEngine]) -> dict[str, RequestOutput]:
    """What all get where nothing fails."""
    return run(scene())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("from_step", [0, 4])
@pytest.mark.parametrize("bad", [("0",), ("3",), ("1", "2")])
def test_a_request_that_makes_steps_fail_ends_and_the_others_do_not_notice(scene, expected, bad, from_step):
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
def test_a_temporary_failure_ends_no_request(scene, expected, every):
    """Each second, third or fifth step fails: never the same one twice."""
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


# Planning


@pytest.mark.sampled(8)
@pytest.mark.parametrize("point", ["blocks.allocate", "blocks.append", "blocks.swap_out", "blocks.swap_in"])
@pytest.mark.parametrize("after", range(4))
def test_a_request_that_cannot_be_planned_ends(scene, expected, point, after):
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
def test_a_request_whose_tokens_cannot_be_taken_ends(scene, expected, after):
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


@pytest.mark.usefixtures("interruptible")
def test_a_request_that_has_ended_in_an_interrupted_step_is_returned_once_and_its_id_is_free(monkeypatch):
    engine = make_engine()
    add(engine, "a", [3] * 3, max_tokens=1)

    def interrupt(**_):
        monkeypatch.undo()
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(engine._isolator, "succeeded", interrupt)  # the tokens are committed, and not returned yet
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert engine.abort_request("a").outputs[0].finish_reason == "length"
    add(engine, "a", [3] * 3, max_tokens=3)
    outputs = [engine.step() for _ in range(3)]
    assert [[len(output.outputs[0].token_ids) for output in step] for step in outputs] == [[1], [2], [3]]
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

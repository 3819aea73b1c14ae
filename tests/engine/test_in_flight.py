"""Several batches in flight: an executor that computes them when they are submitted leaves every answer as it is."""

from collections.abc import Callable
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.common.batch import Batch, StepResult
from quire.common.faults import Fault, inject
from quire.runner import executor as executors
from quire.runner.worker import Worker, make_worker

PROMPTS = [
    [7 * i % 500 + 3 for i in range(29)],
    [5, 6, 7],
    [7 * i % 500 + 3 for i in range(20)] + [4],
    [9] * 3,
    [8] * 30,
]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=9 + i, ignore_eos=True, logprobs=1) for i in range(5)]
SMALL: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 8, "max_num_batched_tokens": 24}


class Ahead:
    """Computes batches when they are submitted."""

    pooler = None
    num_in_flight = 3

    def __init__(self, worker: Worker) -> None:
        self._worker, self._results = worker, dict[int, StepResult | Exception]()
        self.submitted = list[Batch]()
        self.most = 0
        """The largest number of batches that were in flight and had sequences."""
        self.num_shared = 0
        """Sequences that were in two of them."""

    def submit(self, batch: Batch) -> None:
        self.submitted.append(batch)
        self.most = max(self.most, sum(bool(each.sequences) for each in self.submitted))
        seq_ids = [s.seq_id for each in self.submitted for s in each.sequences]
        self.num_shared += len(seq_ids) - len(set(seq_ids))
        try:
            self._results[batch.step] = self._worker.execute(batch)
        except Exception as error:
            self._results[batch.step] = error

    def execute(self, batch: Batch) -> StepResult:
        self.submitted = [each for each in self.submitted if each.step > batch.step]
        result = self._results.pop(batch.step)
        if isinstance(result, Exception):
            raise result
        return result

    def close(self) -> None:
        """Does nothing."""


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    def make(**given: Any) -> LLM:
        with monkeypatch.context() as patch:
            patch.setitem(executors.EXECUTORS, "in_process", lambda *given: Ahead(make_worker(*given)))
            return LLM(**SMALL | given)

    return make


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    return [output.outputs for output in LLM(max_model_len=64).generate(PROMPTS, PARAMS, use_tqdm=False)]


def answers(llm: LLM) -> list[Any]:
    outputs = [output.outputs for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    llm.engine.requests.check_integrity()
    return outputs


@pytest.mark.parametrize(
    "given", [{}, {"swap_space": 0.001, "preemption_mode": "swap"}, {"num_gpu_blocks_override": 40}]
)
def test_answers_are_those_of_one_batch_at_a_time(given: Any, make: Callable[..., LLM], expected: Any) -> None:
    llm = make(**given)
    assert answers(llm) == expected
    assert isinstance(llm.engine.executor, Ahead)
    assert (llm.engine.executor.most, llm.engine.executor.num_shared) == (3, 0)
    assert bool(llm.engine.stats().num_preemptions) == ("num_gpu_blocks_override" not in given)


@pytest.mark.parametrize("times", [1, 3, 7])
@pytest.mark.parametrize("point", ["step.run", "step.execute", "sampler.draw", "step.commit"])
def test_after_a_failure_all_batches_in_flight_are_planned_again(
    point: str, times: int, make: Callable[..., LLM], expected: Any
) -> None:
    llm = make()
    with inject(Fault(point, after=4, times=times)) as injected:
        got = answers(llm)
    assert injected.num_fired == times
    ended = [outputs[0].finish_reason == "abort" for outputs in got]
    assert sum(ended) <= (times > 3)  # a failure that comes back again and again looks like one request's
    assert all(own == its or is_ended for own, its, is_ended in zip(got, expected, ended, strict=True))
    assert answers(llm) == expected


def test_a_request_that_is_aborted_in_flight_leaves_the_others_as_they_are(
    make: Callable[..., LLM], expected: Any
) -> None:
    engine = make().engine
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add_request(str(i), prompt, params)
    done, num_steps = {}, 0
    while engine.has_unfinished_requests():
        done |= {int(output.request_id): output.outputs for output in engine.step() if output.finished}
        num_steps += 1
        if num_steps == 6:
            assert engine.abort_request("2") is not None
            assert engine.abort_request("0") is not None
        engine.requests.check_integrity()
    assert [done[i] for i in (1, 3, 4)] == [expected[i] for i in (1, 3, 4)]
    assert engine.reset_prefix_cache()
    assert engine.blocks.num_used_blocks == 0
    assert not engine.requests.busy()

"""The simulator plans the same steps as an engine whose model draws the same tokens."""

import dataclasses
import random
from collections import deque

import pytest

from quire import EngineArgs, LLMEngine, SamplingParams
from quire.common.batch import Batch, StepResult
from quire.engine.scheduling.scheduler import Scheduler
from quire.interfaces.simulate.fake_model import FakeModel
from quire.interfaces.simulate.simulator import Simulator
from quire.interfaces.simulate.trace import TraceRequest
from quire.runner.memory_plan import plan_memory
from quire.text.tokenizer.tokenizer import Tokenizer

from .helpers import make

BLOCK_SIZE, VOCAB_SIZE = 16, 8192
Arrivals = list[tuple[int, TraceRequest]]


class FakeExecutor:
    """An engine's executor that draws the simulator's tokens."""

    pooler = None
    model: FakeModel

    def execute(self, batch: Batch) -> StepResult:
        return self.model.execute(batch)


def arrivals(rng: random.Random) -> Arrivals:
    """Requests, and the step before which each one is added."""
    made = []
    for _ in range(rng.randint(8, 14)):
        prompt_len, group = rng.randint(4, 90), rng.choice([None, 0, 1])
        prefix_len = 0 if group is None else rng.randint(1, prompt_len)
        tenant, priority, n = rng.choice("ab"), rng.randint(0, 3), rng.choice([1, 1, 2, 3, 4])
        request = TraceRequest(0, prompt_len, rng.randint(1, 40), group, prefix_len, tenant, priority, n)
        made.append((rng.randint(0, 40), request))
    return sorted(made, key=lambda arrival: arrival[0])


def prompt(index: int, request: TraceRequest) -> list[int]:
    return [token_id % VOCAB_SIZE for token_id in request.prompt_token_ids(index)]


def planned_by(scheduler: Scheduler) -> list[object]:
    """What is in each batch that is planned from now on: by request and sample, the first token and their number."""
    plans, schedule = [], scheduler.schedule

    def schedule_and_note(*only: object) -> Batch:
        batch, owners = schedule(*only), scheduler.requests.owners
        names = [(owners[s.seq_id][0].request_id, owners[s.seq_id][1].output.index) for s in batch.sequences]
        rows = [(s.start, len(s.token_ids)) for s in batch.sequences]
        plans.append((list(zip(names, rows, strict=True)), len(batch.copies), batch.ignored))
        return batch

    scheduler.schedule = schedule_and_note
    return plans


def simulated(requests: Arrivals, **limits: int | str) -> tuple[Simulator, list[object]]:
    simulator = make(block_size=BLOCK_SIZE, **limits)
    simulator.lane._is_possible = False  # so that all steps are planned by the scheduler
    plans, left, num_turns = planned_by(simulator.scheduler), deque(enumerate(requests)), 0
    while left or simulator.requests:
        while left and left[0][1][0] <= num_turns:
            index, (_, request) = left.popleft()
            simulator.add(simulator.now_s, index, request, prompt(index, request), 0)
        if simulator.requests:
            simulator.step()
        num_turns += 1
    return simulator, plans


def engine_of(num_blocks: int, tokens: int, seqs: int, policy: str) -> LLMEngine:
    arguments = {"scheduling_policy": policy, "max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    sizes = {"num_gpu_blocks_override": num_blocks, "block_size": BLOCK_SIZE, "max_model_len": 200}
    plan = plan_memory(EngineArgs(speculative_config={"method": "off"}, **arguments, **sizes))
    plan = dataclasses.replace(plan, kv_cache=dataclasses.replace(plan.kv_cache, num_host_blocks=0))
    engine = LLMEngine(plan, FakeExecutor(), Tokenizer.from_path(plan.config.model.tokenizer_path))
    engine.executor.model = FakeModel(lambda seq_id: engine.requests.owners[seq_id][1].token_ids)
    return engine


def run(engine: LLMEngine, requests: Arrivals) -> list[object]:
    plans, left, num_turns = planned_by(engine.scheduler), deque(enumerate(requests)), 0
    while left or engine.has_unfinished_requests():
        while left and left[0][1][0] <= num_turns:
            index, (_, r) = left.popleft()
            settings = {"max_tokens": r.output_len, "n": r.n, "priority": r.priority, "tenant": r.tenant}
            params = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **settings)
            engine.add_request(str(index), prompt(index, r), params)
        if engine.has_unfinished_requests():
            engine.step()
        num_turns += 1
    return plans


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", [1, 3, 5, 6, 7, 8, 10, 11])
def test_the_engine_plans_the_same_steps(seed):
    rng = random.Random(seed)
    limits = {"num_blocks": rng.choice([13, 20]), "tokens": rng.choice([32, 64, 256]), "seqs": rng.choice([4, 8, 16])}
    policy, requests = rng.choice(["fcfs", "priority", "fair"]), arrivals(rng)
    simulator, expected = simulated(requests, policy=policy, **limits)
    engine = engine_of(policy=policy, **limits)
    assert run(engine, requests) == expected
    assert engine.scheduler.preemptor.num_preemptions == simulator.scheduler.preemptor.num_preemptions > 0

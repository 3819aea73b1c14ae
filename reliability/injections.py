"""Inject failures into a running engine, and check that a failure ends only the request whose work it hits.

    python -m reliability.injections [--count 10000] [--seed 1] [--only NUMBER ...] [--record]

The engine runs the embedded model in small caches, so that requests share prefixes, wait, are swapped and recomputed.
Each injection runs a workload (greedy and sampled requests, samples, beams, grammars, stop strings, processors,
log-probabilities and scores, or of a model that pools vectors, classes and scores) with one fault, chosen by the seed:
at a fault point of `quire.common.faults`, in a native kernel's allocation, or in the executor whenever a certain
request runs. Afterwards every other request must have the same output, to the last bit of its log-probabilities and
vectors, as without the fault; a fault in the common work of a step must have ended no request; block accounting must be
consistent after every step; and no block may be in use at the end.
Prints counts by fault point and a line of JSON. `--only` repeats injections by their numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import logging
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sized
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from quire import EngineArgs, LLMEngine, RequestOutput
from quire.common.batch import Batch, StepResult
from quire.common.errors import EngineBrokenError, RequestFailedError
from quire.common.faults import Fault, Injected, inject
from quire.runner.memory_plan import plan_memory
from quire.runner.worker import Worker
from quire.text.tokenizer.tokenizer import Tokenizer
from reliability.injection_workloads import POOLING_TASKS, Wish, pooling_checkpoint, wishes_of
from reliability.page import record, table

NUM_WORKLOADS = 24
STEPS_LIMIT = 1000
PERSISTENT = "executor.request"
"""Not a fault point: the executor fails whenever a certain request is in the step."""
OWN = {
    *("blocks.allocate", "blocks.append", "blocks.swap_out", "blocks.swap_in", "tokenizer.encode", "grammar.compile"),
    *("grammar.mask", "sampler.row", "commit.sequence", "detokenizer.append", "detokenizer.text", "output.make"),
    "pool.sequence",
}
"""Fault points in the work for one request, which a failure ends."""
COMMON = {
    *("step.start", "step.execute", "step.run", "step.commit", "step.end", "cache.transfer"),
    *("cache.copy", "memory.workspace", "memory.native", "sampler.draw", "scoring.rows"),
}
"""Fault points in the common work of a step, where one or two failures end no request."""
ERRORS = ("RuntimeError", "MemoryError", "ENOSPC", "KeyError", "ValueError", "AssertionError")

SMALL: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 40,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
    "num_threads": 2,
}
SETUPS: dict[str, dict[str, Any]] = {
    "swapping": {"num_gpu_blocks_override": 12, "num_host_blocks": 60, "preemption_mode": "swap"},
    "fair": {"num_gpu_blocks_override": 14, "num_host_blocks": 10, "scheduling_policy": "fair"},
    "by prefix": {"num_gpu_blocks_override": 24, "num_host_blocks": 0, "scheduling_policy": "prefix"},
    "uncached": {"num_gpu_blocks_override": 12, "num_host_blocks": 40, "enable_prefix_caching": False},
    "embedding": {"num_gpu_blocks_override": 14, "num_host_blocks": 10, "scheduling_policy": "fair"},
    "scoring": {"num_gpu_blocks_override": 12, "num_host_blocks": 0, "scheduling_policy": "prefix"},
    "classifying": {"num_host_blocks": 0},
}
"""Configurations of the engine: its arguments, and the blocks of the host tier. Models that are named in POOLING_TASKS
pool."""

Said = list[tuple[Any, ...]]
"""The output of a request: tokens, text, reasons and log-probabilities of each sequence."""


class OneFails:
    """An executor that wraps another and fails whenever a certain request is in the step."""

    def __init__(self, engine: LLMEngine, request_id: str, from_step: int) -> None:
        self.engine, self.executor = engine, engine.executor
        self.request_id, self.from_step = request_id, engine.scheduler.num_steps + from_step
        self.num_failures = 0
        self.pooler = engine.executor.pooler

    def execute(self, batch: Batch) -> StepResult:
        """Execute the batch, then raise if the request is in it."""
        owners = [self.engine.requests.owners.get(s.seq_id) for s in batch.sequences]
        result = self.executor.execute(batch)
        if batch.step > self.from_step and any(o is not None and o[0].request_id == self.request_id for o in owners):
            self.num_failures += 1
            raise RuntimeError("injected")
        return result

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """As the executor that it wraps."""
        self.executor.load_adapter(slot, folder, digest)

    def unload_adapter(self, slot: int) -> None:
        """As the executor that it wraps."""
        self.executor.unload_adapter(slot)

    def close(self) -> None:
        """Close the executor that it stands for."""
        self.executor.close()


@dataclasses.dataclass
class Outcome:
    """The outcome of a workload."""

    said: dict[str, Said] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    owners: dict[int, str] = dataclasses.field(default_factory=dict)
    """The request id of each sequence, by seq_id."""


class Scene:
    """Engines of all configurations, and the outputs of each workload without faults, which are the same in all."""

    def __init__(self) -> None:
        self.engines = {setup: make_engine(setup) for setup in SETUPS}
        self._expected: dict[tuple[int, str | None], Outcome] = {}
        self._passes: dict[tuple[int, str], dict[str, int]] = {}

    def expected(self, number: int, setup: str) -> Outcome:
        """The outcome of a workload without faults."""
        return self._expected[number, pooled_by(setup)]

    def renew(self, setup: str) -> None:
        """Replace a broken engine by a new one."""
        self.engines[setup] = make_engine(setup)

    def passes(self, number: int, setup: str) -> dict[str, int]:
        """Return how often a workload passes each fault point without faults."""
        if (number, setup) not in self._passes:
            wishes = wishes_of(number, setup)
            outcomes = [self.run(wishes, setup)]
            with ExitStack() as stack:
                points = sorted((OWN | COMMON) - {"memory.native"})
                counting = [stack.enter_context(inject(Fault(point, after=10**9))) for point in points]
                outcomes.append(self.run(wishes, setup, fresh_grammars=True))
            expected = self._expected.setdefault((number, pooled_by(setup)), outcomes[0])
            assert all(outcome.said == expected.said for outcome in outcomes), "equal requests have different outputs"
            assert not expected.errors, expected.errors
            passed = {injected.fault.point: injected.num_passed for injected in counting}
            self._passes[number, setup] = passed | {"memory.native": 400}
        return self._passes[number, setup]

    def run(self, wishes: list[Wish], setup: str, fresh_grammars: bool = False) -> Outcome:
        """Run requests to their end, checking the block accounting after every step."""
        engine, outcome = self.engines[setup], Outcome()
        if fresh_grammars:
            engine.grammars.compiler._verdicts.clear()
        for request_id, prompt, params in wishes:
            try:
                if params is None:
                    engine.add_scoring_request(request_id, *prompt)
                else:
                    engine.add_request(request_id, prompt, params)
            except RequestFailedError as error:
                outcome.errors[request_id] = str(error)
        groups = dict(engine._groups)
        for _ in range(STEPS_LIMIT):
            if not engine.has_unfinished_requests():
                break
            for output in engine.step():
                if output.finished:
                    self._note(outcome, output)
            engine.requests.check_integrity()
        else:
            raise AssertionError(f"requests have not ended after {STEPS_LIMIT} steps")
        outcome.owners = {seq.seq_id: name for name, group in groups.items() for seq in group.seqs}
        check_nothing_is_left(engine)
        return outcome

    @staticmethod
    def _note(outcome: Outcome, output: RequestOutput) -> None:
        assert output.request_id not in outcome.said, f"{output.request_id!r} has finished twice"
        if output.error is not None:
            outcome.errors[output.request_id] = output.error
        outcome.said[output.request_id] = [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob, one.logprobs)
            for one in output.outputs
        ] + [(output.prompt_logprobs, None if output.pooled is None else output.pooled.tobytes())]


def pooled_by(setup: str) -> str | None:
    """The model that pools in the engines of a configuration; None if they generate."""
    return setup if setup in POOLING_TASKS else None


def make_engine(setup: str) -> LLMEngine:
    """Make an engine with a model of its own."""
    given = dict(SETUPS[setup])
    num_host_blocks = given.pop("num_host_blocks")
    if setup in POOLING_TASKS:
        given |= {"model": pooling_checkpoint(setup), "runner": "pooling"}
    plan = plan_memory(EngineArgs(**SMALL, **given))
    plan = dataclasses.replace(plan, kv_cache=dataclasses.replace(plan.kv_cache, num_host_blocks=num_host_blocks))
    config = plan.config
    worker = Worker(config.model, plan.kv_cache, config.parallel)
    return LLMEngine(plan, worker, Tokenizer.from_path(config.model.tokenizer_path))


def check_nothing_is_left(engine: LLMEngine) -> None:
    """Check that no blocks and no state are left after the last request."""
    engine.requests.check_integrity()
    assert engine.blocks.num_used_blocks == 0, f"{engine.blocks.num_used_blocks} blocks are left in use"
    host = engine.blocks.tiers.pools[1]
    assert host.num_free_blocks == host.num_blocks, "host blocks are left in use"
    left: list[Sized] = [
        engine.requests.owners,
        engine.requests.running,
        engine.requests.policy,
    ]
    left += [engine._groups, engine._changed, engine.grammars]
    if engine.blocks.prefixes is not None:
        left.append(engine.blocks.prefixes.chains)
    assert not any(len(kept) for kept in left), "the state of a request is left"


@dataclasses.dataclass(frozen=True)
class Injection:
    """One injection of the run, determined by the run's seed and its number."""

    workload: int
    setup: str
    point: str
    fault: Fault | None
    """The fault; None if the point is PERSISTENT."""
    victim: str = ""
    from_step: int = 0


def choose(seed: int, number: int, passes: Callable[[int, str], dict[str, int]], num_workloads: int) -> Injection:
    """Return the injection of this number. `passes` says how often a workload passes each point in a configuration."""
    rng = random.Random(f"injection {seed} {number}")
    where = rng.randrange(num_workloads), rng.choice(list(SETUPS))
    passed = passes(*where)
    if rng.random() < 0.08:
        victim = rng.choice(wishes_of(*where))[0]
        return Injection(*where, PERSISTENT, None, victim, rng.randrange(8))
    point = rng.choice(sorted(point for point, count in passed.items() if count))
    after = int(passed[point] * rng.random() ** 2)  # mostly early, since a fault changes later passes
    if rng.random() < 0.05 and point != "memory.native":
        return Injection(*where, point, Fault(point, "delay", seconds=0.001, after=after))
    times = 1 if rng.random() < 0.8 else 2
    return Injection(*where, point, Fault(point, error=rng.choice(ERRORS), after=after, times=times))


def disturb(scene: Scene, injection: Injection) -> tuple[Outcome, int, Collection[str] | None]:
    """Run an injection. Returns the outcome, how often the fault fired, and the ids of requests that must have ended.

    The ids are None if any request may have ended, at most one per failure.
    """
    given = wishes_of(injection.workload, injection.setup), injection.setup
    engine = scene.engines[injection.setup]
    if injection.fault is None:
        failing = OneFails(engine, injection.victim, injection.from_step)
        engine.executor = failing
        try:
            outcome = scene.run(*given)
        finally:
            engine.executor = failing.executor
        return outcome, failing.num_failures, {injection.victim} if failing.num_failures else ()
    with inject(injection.fault) as injected:
        outcome = scene.run(*given, fresh_grammars=injection.point == "grammar.compile")
    return outcome, injected.num_fired, _who_ends(injection, injected, outcome)


def _who_ends(injection: Injection, injected: Injected, outcome: Outcome) -> Collection[str] | None:
    fault = injected.fault
    if fault.action == "delay" or not injected.num_fired:
        return ()
    if injection.point.startswith("memory.") and injection.setup in POOLING_TASKS:
        return None  # it may hit the pooling of one text, which is that request's own work
    if injection.point in COMMON:
        return ()  # it fires twice at most, so the isolated candidates do not fail again
    subjects = [subject for subject in injected.subjects if subject is not None]
    names = {outcome.owners.get(s) if isinstance(s, int) else str(s) for s in subjects}
    if subjects and None not in names:
        return {name for name in names if name is not None}
    return None  # the fault has no subject, or a beam that has ended


def complaint(scene: Scene, injection: Injection) -> tuple[str | None, int, int]:
    """Run an injection. Returns what is wrong (None if nothing), how often it fired, and how many requests it ended."""
    expected = scene.expected(injection.workload, injection.setup)
    try:
        outcome, num_fired, ought_to_end = disturb(scene, injection)
    except (AssertionError, EngineBrokenError) as error:
        scene.renew(injection.setup)
        return f"{type(error).__name__}: {error}", 1, 0
    ended = outcome.errors.keys()
    at_most = 0 if ought_to_end is None and not num_fired else num_fired
    if ought_to_end is not None and set(ended) != set(ought_to_end):
        return f"ended: {sorted(ended)} instead of {sorted(ought_to_end)}", num_fired, len(ended)
    if len(ended) > at_most or (injection.point in OWN and _raises(injection) and num_fired and not ended):
        return f"{num_fired} failures ended {sorted(ended)}", num_fired, len(ended)
    wrong = [name for name in expected.said if name not in ended and outcome.said.get(name) != expected.said[name]]
    return (f"changed: {wrong}" if wrong else None), num_fired, len(ended)


def _raises(injection: Injection) -> bool:
    return injection.fault is None or injection.fault.action == "raise"


@dataclasses.dataclass
class Report:
    """The counts of a run."""

    fired: Counter[str] = dataclasses.field(default_factory=Counter)
    injected: Counter[str] = dataclasses.field(default_factory=Counter)
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    num_requests: int = 0
    wrong: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def rows(self) -> list[dict[str, object]]:
        """Return a row of the table for each fault point."""
        return [
            {
                "point": point,
                "injected": self.injected[point],
                "fired": self.fired[point],
                "requests ended": self.ended[point],
            }
            for point in sorted(self.injected)
        ]


def inject_all(
    numbers: Iterable[int],
    seed: int,
    num_workloads: int = NUM_WORKLOADS,
    show: Callable[[str], None] = print,
    until_fired: int | None = None,
) -> Report:
    """Run these injections in order, until `until_fired` of them have fired, and count the outcomes."""
    scene, report = Scene(), Report()
    logger, was_disabled = logging.getLogger("quire"), logging.getLogger("quire").disabled
    logger.disabled = True  # every injection would be logged
    try:
        for number in numbers:
            if report.fired.total() == until_fired:
                break
            injection = choose(seed, number, scene.passes, num_workloads)
            what, num_fired, num_ended = complaint(scene, injection)
            report.injected[injection.point] += 1
            report.fired[injection.point] += num_fired > 0
            report.ended[injection.point] += num_ended
            report.num_requests += len(wishes_of(injection.workload, injection.setup))
            if what is not None:
                report.wrong.append((number, what))
                show(f"injection {number}: {what}\n    {injection}")
    finally:
        logger.disabled = was_disabled
    return report


def main() -> int:
    """Run the injections and print the result; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="number of injections that fire")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="run only these injections")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    start_s = time.monotonic()
    report = inject_all(options.only or itertools.count(), options.seed, until_fired=options.count)
    print(*table(report.rows()), sep="\n")
    row = {
        "name": "injections",
        "seed": options.seed,
        "injections": report.injected.total(),
        "fired": report.fired.total(),
        "requests": report.num_requests,
        "requests_ended": report.ended.total(),
        "wrong": len(report.wrong),
        "seconds": round(time.monotonic() - start_s, 1),
    }
    print(json.dumps(row), flush=True)
    if options.record:
        summary = (
            f"{row['injections']:,} injections, of which {row['fired']:,} fired, in {row['requests']:,} requests. "
            f"{row['requests_ended']:,} requests ended, each the one whose work was hit. Violations: {row['wrong']}. "
            f"Time: {row['seconds']} s."
        )
        command = f"python -m reliability.injections --count {options.count} --seed {options.seed}"
        record("injections", command, [summary, "", *table(report.rows())])
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

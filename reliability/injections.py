"""Let one thing after another fail in a working engine, and see that only the request fails whose work it was.

    python -m reliability.injections [--count 10000] [--seed 1] [--only NUMBER ...] [--record]

The embedded model in small caches, so that requests share prefixes, wait, are swapped and computed again. Each
injection runs one of some workloads (greedy and sampled requests, samples, beams, grammars, stop strings, processors,
log-probabilities, scores) with a fault armed somewhere, chosen by the seed: at a named point of `quire.common.faults`,
in the memory of the native kernels, or in the executor whenever a certain request runs. Then every other request must
have said, to the last bit of its log-probabilities, what it says undisturbed; a fault that can be nobody's must have
ended nobody; the accounts must be in order after every step; and at the end nothing may be held. Ends with counts by
point and a line of JSON; `--only` repeats injections by their numbers."""

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
from typing import Any

from torch import Tensor

from quire import BeamSearchParams, EngineArgs, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.common.batch import Batch, StepResult
from quire.common.errors import EngineBrokenError, RequestFailedError
from quire.common.faults import Fault, Injected, inject
from quire.runner.memory_plan import plan_memory
from quire.runner.worker import Worker
from quire.text.tokenizer.tokenizer import Tokenizer
from reliability.page import record, table

NUM_WORKLOADS = 24
STEPS_LIMIT = 1000
VOCAB = range(3, 8000)
PERSISTENT = "executor.request"
"""no point of the table: the executor fails whenever a certain request is in the step"""
OWN = {
    *("blocks.allocate", "blocks.append", "blocks.swap_out", "blocks.swap_in", "tokenizer.encode", "grammar.compile"),
    *("grammar.mask", "sampler.row", "commit.sequence", "detokenizer.append", "detokenizer.text", "output.make"),
}
"""points in a request's own work: whoever is hit there ends"""
COMMON = {
    *("step.start", "step.execute", "step.run", "step.commit", "step.end", "cache.transfer"),
    *("cache.copy", "memory.workspace", "memory.native", "sampler.draw", "scoring.rows"),
}
"""points in what all do together: nobody ends for a failure or two"""
ERRORS = ("RuntimeError", "MemoryError", "ENOSPC", "KeyError", "ValueError", "AssertionError")

SMALL = {
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
}
"""ways in which an engine works: arguments, and blocks of the host tier"""

Wish = tuple[str, Any, SamplingParams | BeamSearchParams | None]
"""request id, prompt, params; without params the prompt is (context, continuation), to be scored"""
Said = list[tuple[Any, ...]]
"""what a request said: tokens, text, reasons and log-probabilities of each output"""


def lift(output_token_ids: list[int], logits: Tensor) -> Tensor:
    """A logits processor."""
    return logits + 0.5 * (len(output_token_ids) % 3)


def workload(number: int) -> list[Wish]:
    """Five to eight requests of all kinds; always the same for one number."""
    rng = random.Random(f"workload {number}")
    common = rng.choices(VOCAB, k=rng.randint(4, 11))
    kinds = ["plain", "sampled", "samples", "beams", "grammar", "stop", "told", "changed", "processed", "scored"]
    chosen = [*rng.sample(kinds, k=rng.randint(4, 7)), "plain"]
    wishes = []
    for place, kind in enumerate(chosen):
        own = rng.choices(VOCAB, k=rng.randint(1, 8))
        prompt: Any = common + own if rng.random() < 0.5 else own
        request_id = f"{place} {kind}"
        if kind == "stop" and rng.random() < 0.7:
            prompt = rng.choice(["def add(a, b):", "import os", "The list of"])
        wishes.append((request_id, (prompt, own) if kind == "scored" else prompt, _params(kind, rng)))
    return wishes


def _params(kind: str, rng: random.Random) -> SamplingParams | BeamSearchParams | None:
    length = rng.randint(2, 9)
    if kind == "scored":
        return None
    if kind == "beams":
        return BeamSearchParams(rng.randint(2, 3), min(length, 5))
    given: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 0},
        "sampled": {"temperature": 0.9, "top_p": 0.9},
        "samples": {"n": rng.randint(2, 3)},
        "grammar": {
            "structured_outputs": StructuredOutputsParams(choice=[str(rng.randrange(10**6)), str(rng.randrange(99))])
        },
        "stop": {"stop": ["e", "("], "min_tokens": 1},
        "told": {"logprobs": 2, "prompt_logprobs": rng.choice([None, 1])},
        "changed": {"frequency_penalty": 0.7, "bad_words": ["the", " a"], "logit_bias": {5: 1.0}},
        "processed": {"logits_processors": [lift]},
    }
    kept: dict[str, Any] = {"seed": rng.randrange(10**6), "max_tokens": length, "ignore_eos": kind != "grammar"}
    return SamplingParams(**kept, output_kind=rng.choice(["cumulative", "final_only"]), **given[kind])


class OneFails:
    """An executor around another, which fails whenever a certain request is in the step."""

    def __init__(self, engine: LLMEngine, request_id: str, from_step: int) -> None:
        self.engine, self.executor = engine, engine.executor
        self.request_id, self.from_step = request_id, engine.scheduler.num_steps + from_step
        self.num_failures = 0

    def execute(self, batch: Batch) -> StepResult:
        """As the other one."""
        owners = [self.engine.scheduler.owner(s.seq_id) for s in batch.sequences]
        result = self.executor.execute(batch)
        if batch.step > self.from_step and any(o is not None and o[0].request_id == self.request_id for o in owners):
            self.num_failures += 1
            raise RuntimeError("injected")
        return result


@dataclasses.dataclass
class Outcome:
    """What came of a workload."""

    said: dict[str, Said] = dataclasses.field(default_factory=dict)
    errors: dict[str, str] = dataclasses.field(default_factory=dict)
    owners: dict[int, str] = dataclasses.field(default_factory=dict)
    """by seq_id, whose sequence it is"""


class Scene:
    """Engines that work in different ways, and what each workload says undisturbed, which is the same in all."""

    def __init__(self) -> None:
        self.engines = {setup: make_engine(setup) for setup in SETUPS}
        self.expected: dict[int, Outcome] = {}
        self._passes: dict[tuple[int, str], dict[str, int]] = {}

    def renew(self, setup: str) -> None:
        """Another engine in the place of one that is broken."""
        self.engines[setup] = make_engine(setup)

    def passes(self, number: int, setup: str) -> dict[str, int]:
        """How often a workload passes each point, undisturbed."""
        if (number, setup) not in self._passes:
            wishes = workload(number)
            outcomes = [self.run(wishes, setup, "step")]
            with ExitStack() as stack:
                points = sorted((OWN | COMMON) - {"memory.native"})
                counting = [stack.enter_context(inject(Fault(point, after=10**9))) for point in points]
                outcomes.append(self.run(wishes, setup, "step", fresh_grammars=True))
            expected = self.expected.setdefault(number, outcomes[0])
            assert all(outcome.said == expected.said for outcome in outcomes), "the same requests say different things"
            assert not expected.errors, expected.errors
            passed = {injected.fault.point: injected.num_passed for injected in counting}
            self._passes[number, setup] = passed | {"memory.native": 400}
        return self._passes[number, setup]

    def run(self, wishes: list[Wish], setup: str, step: str, fresh_grammars: bool = False) -> Outcome:
        """Run requests to their end, looking at the accounts after every step."""
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
            for output in getattr(engine, step)():
                if output.finished:
                    self._note(outcome, output)
            engine.scheduler.check_integrity()
        else:
            raise AssertionError("steps without end")
        outcome.owners = {seq.seq_id: name for name, group in groups.items() for seq in group.seqs}
        check_nothing_is_held(engine)
        return outcome

    @staticmethod
    def _note(outcome: Outcome, output: RequestOutput) -> None:
        assert output.request_id not in outcome.said, f"{output.request_id!r} has finished twice"
        if output.error is not None:
            outcome.errors[output.request_id] = output.error
        outcome.said[output.request_id] = [
            (one.token_ids, one.text, one.finish_reason, one.stop_reason, one.cumulative_logprob, one.logprobs)
            for one in output.outputs
        ] + [(output.prompt_logprobs,)]


def make_engine(setup: str) -> LLMEngine:
    """An engine with a model of its own."""
    given = dict(SETUPS[setup])
    num_host_blocks = given.pop("num_host_blocks")
    plan = plan_memory(EngineArgs.from_kwargs(**SMALL, **given))
    plan = dataclasses.replace(plan, kv_cache=dataclasses.replace(plan.kv_cache, num_host_blocks=num_host_blocks))
    config = plan.config
    worker = Worker(config.model, plan.kv_cache, config.parallel)
    return LLMEngine(plan, worker, Tokenizer.from_path(config.model.tokenizer_path))


def check_nothing_is_held(engine: LLMEngine) -> None:
    """After the last request."""
    engine.scheduler.check_integrity()
    assert engine.blocks.num_used_blocks == 0, f"{engine.blocks.num_used_blocks} blocks are held by nobody"
    host = engine.blocks.tiers.pools[1]
    assert host.num_free_blocks == host.num_blocks, "blocks of the host tier are still held"
    left: list[Sized] = [engine.scheduler._owners, engine.scheduler.running, engine.scheduler.policy]
    left += [engine._groups, engine._changed, engine.grammars]
    if engine.blocks.prefixes is not None:
        left.append(engine.blocks.prefixes.chains)
    assert not any(len(kept) for kept in left), "a request is kept"


@dataclasses.dataclass(frozen=True)
class Injection:
    """One of the run: everything follows from the run's seed and its number."""

    workload: int
    setup: str
    step: str
    point: str
    fault: Fault | None
    """None for PERSISTENT"""
    victim: str = ""
    from_step: int = 0


def choose(seed: int, number: int, passes: Callable[[int, str], dict[str, int]], num_workloads: int) -> Injection:
    """The injection of this number. `passes`: how often a workload passes each point in a setup."""
    rng = random.Random(f"injection {seed} {number}")
    where = rng.randrange(num_workloads), rng.choice(list(SETUPS)), rng.choice(["step", "step_ahead"])
    passed = passes(*where[:2])
    if rng.random() < 0.08:
        victim = rng.choice(workload(where[0]))[0]
        return Injection(*where, PERSISTENT, None, victim, rng.randrange(8))
    point = rng.choice(sorted(point for point, count in passed.items() if count))
    after = int(passed[point] * rng.random() ** 2)  # rather early: with another fault the passes are others
    if rng.random() < 0.05 and point != "memory.native":
        return Injection(*where, point, Fault(point, "delay", seconds=0.001, after=after))
    times = 1 if rng.random() < 0.8 else 2
    return Injection(*where, point, Fault(point, error=rng.choice(ERRORS), after=after, times=times))


def disturb(scene: Scene, injection: Injection) -> tuple[Outcome, int, Collection[str] | None]:
    """Run it. What came of it, how often it fired, and who ought to have ended: None if anybody may, once for each."""
    engine, given = scene.engines[injection.setup], (workload(injection.workload), injection.setup, injection.step)
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
    if injection.point in COMMON:
        return ()  # twice at most: who is accused then does not fail again
    subjects = [subject for subject in injected.subjects if subject is not None]
    names = {outcome.owners.get(s) if isinstance(s, int) else str(s) for s in subjects}
    if subjects and None not in names:
        return {name for name in names if name is not None}
    return None  # it does not say whom it hit, or a beam that is no more


def complaint(scene: Scene, injection: Injection) -> tuple[str | None, int, int]:
    """What is wrong with what came of an injection, how often it fired, and how many requests it ended."""
    expected = scene.expected[injection.workload]
    try:
        outcome, num_fired, ought_to_end = disturb(scene, injection)
    except (AssertionError, EngineBrokenError) as error:
        scene.renew(injection.setup)
        return f"{type(error).__name__}: {error}", 1, 0
    ended = outcome.errors.keys()
    at_most = 0 if ought_to_end is None and not num_fired else num_fired
    if ought_to_end is not None and set(ended) != set(ought_to_end):
        return f"ended: {sorted(ended)}, and not {sorted(ought_to_end)}", num_fired, len(ended)
    if len(ended) > at_most or (injection.point in OWN and _raises(injection) and num_fired and not ended):
        return f"{num_fired} failures ended {sorted(ended)}", num_fired, len(ended)
    wrong = [name for name in expected.said if name not in ended and outcome.said.get(name) != expected.said[name]]
    return (f"changed: {wrong}" if wrong else None), num_fired, len(ended)


def _raises(injection: Injection) -> bool:
    return injection.fault is None or injection.fault.action == "raise"


@dataclasses.dataclass
class Report:
    """Counts of a run."""

    fired: Counter[str] = dataclasses.field(default_factory=Counter)
    injected: Counter[str] = dataclasses.field(default_factory=Counter)
    ended: Counter[str] = dataclasses.field(default_factory=Counter)
    num_requests: int = 0
    wrong: list[tuple[int, str]] = dataclasses.field(default_factory=list)

    def rows(self) -> list[dict[str, object]]:
        """A line for each point."""
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
    tell: Callable[[str], None] = print,
    until_fired: int | None = None,
) -> Report:
    """Make these injections of a run, one after another in one engine, or until so many have fired."""
    scene, report = Scene(), Report()
    logger, was_disabled = logging.getLogger("quire"), logging.getLogger("quire").disabled
    logger.disabled = True  # it would tell of every one
    try:
        for number in numbers:
            if report.fired.total() == until_fired:
                break
            injection = choose(seed, number, scene.passes, num_workloads)
            what, num_fired, num_ended = complaint(scene, injection)
            report.injected[injection.point] += 1
            report.fired[injection.point] += num_fired > 0
            report.ended[injection.point] += num_ended
            report.num_requests += len(workload(injection.workload))
            if what is not None:
                report.wrong.append((number, what))
                tell(f"injection {number}: {what}\n    {injection}")
    finally:
        logger.disabled = was_disabled
    return report


def main() -> int:
    """Inject and tell; 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=10_000, help="injections that fire")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="of all, make only these")
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
            f"{row['injections']:,} injections, of which {row['fired']:,} hit something, among {row['requests']:,} "
            f"requests: {row['requests_ended']:,} ended, each the one that was hit; wrong: {row['wrong']}. "
            f"{row['seconds']} s."
        )
        command = f"python -m reliability.injections --count {options.count} --seed {options.seed}"
        record("injections", command, [summary, "", *table(report.rows())])
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

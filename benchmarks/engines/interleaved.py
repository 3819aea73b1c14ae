"""Engines on the same cases, interleaved: A B C A B C."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engines.peers import ROOT, Engine, LeftOutError, Quire
from benchmarks.engines.session import Session
from quire.cli.bench.limits import Limits, WeightCosts

Row = dict[str, Any]
Costs = Callable[[Session], WeightCosts | None]
"""What an engine reads and multiplies in a step; None if it is not compared with the machine's limit."""

_WARM_UP_TOKENS = 4
TINY = ROOT / "src" / "quire" / "models" / "embedded" / "quire-tiny"


@dataclass(frozen=True)
class Run:
    """The settings that all figures share."""

    folder: Path
    """Folder of environments, converted models and logs."""
    checkpoint: Path
    quick: bool
    engines: frozenset[str]
    """Names of the engines to measure."""

    @property
    def rounds(self) -> int:
        """Number of rounds of each case, if they do not take long."""
        return 2 if self.quick else 3

    def wants_another_round(self, done: int, elapsed_s: float) -> bool:
        """Whether engines run a case once more: twice at least, and short cases up to nine times, since shared memory
        changes its speed within seconds."""
        if done < self.rounds:
            return done < 2 or elapsed_s < 60
        return not self.quick and done < 9 and elapsed_s < 45


def case(num_prompts: int, input_len: int, output_len: int) -> dict[str, int]:
    """A case: prompts that start together, of equal lengths."""
    return {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}


def interleaved(
    run: Run,
    engines: Sequence[Engine],
    checkpoint: Path,
    cases: Sequence[Mapping[str, int]],
    max_model_len: int,
    costs: Costs = lambda _: None,
) -> Iterator[Row]:
    """Load all engines, then run each case as A B C A B C, measuring the machine's limits before each round."""
    with ExitStack() as stack:
        sessions, rows = start(stack, run, engines, checkpoint, max_model_len)
        yield from rows
        if not sessions:
            return
        probe = sessions[0] if isinstance(sessions[0].engine, Quire) else _probe(stack, run)
        for each in cases:
            yield from _warm_up(sessions, probe, each)
            yield from _compare(run, sessions, probe, each, costs)


def start(
    stack: ExitStack, run: Run, engines: Sequence[Engine], checkpoint: Path, max_model_len: int
) -> tuple[list[Session], list[Row]]:
    """The engines that are wanted and can be started, which `stack` will end, and a row for each that is wanted."""
    sessions, rows = list[Session](), list[Row]()
    for engine in engines:
        if engine.name in run.engines:
            rows.append({"engine": engine.name, "precision": engine.precision})
            try:
                sessions.append(Session(engine, checkpoint, max_model_len))
            except LeftOutError as reason:
                rows[-1]["left_out"] = str(reason).split(" (")[0]
                continue
            stack.callback(sessions[-1].close)
            rows[-1]["load_s"] = round(sessions[-1].load_s, 2)
    return sessions, rows


def _probe(stack: ExitStack, run: Run) -> Session:
    """Return a session of Quire that measures the machine if Quire itself is not compared."""
    session = Session(Quire(run.folder), TINY, 1024)
    stack.callback(session.close)
    return session


def _warm_up(sessions: list[Session], probe: Session, case: Mapping[str, int]) -> Iterator[Row]:
    """Run a case once, since every engine is slower then. One that fails is left out from here on."""
    for session in list(sessions):
        try:
            session.call("generate", **{**case, "output_len": min(_WARM_UP_TOKENS, case["output_len"])})
        except LeftOutError as reason:
            if session is probe:
                raise
            sessions.remove(session)
            yield {"engine": session.engine.name, "precision": session.engine.precision, "left_out": str(reason)}


def _compare(
    run: Run, sessions: Sequence[Session], probe: Session, case: Mapping[str, int], costs: Costs
) -> Iterator[Row]:
    times: list[list[float]] = [[] for _ in sessions]
    machines: list[Limits] = []
    started = time.perf_counter()
    while run.wants_another_round(len(machines), time.perf_counter() - started):
        machines.append(Limits(**probe.call("limits", precision=sessions[0].engine.arithmetic)))
        for its_times, session in zip(times, sessions, strict=True):
            its_times.append(session.call("generate", **case)["elapsed_s"])
    limit = Limits(
        statistics.median(found.read_bytes_per_s for found in machines),
        statistics.median(found.flops_per_s for found in machines),
    )
    for its_times, session in zip(times, sessions, strict=True):
        elapsed_s = statistics.median(its_times)
        precision = session.engine.precision
        row = {"engine": session.engine.name, "precision": precision, **case}
        row |= {"elapsed_s": [round(seconds, 4) for seconds in its_times]}
        row |= {"output_tokens_per_s": round(case["num_prompts"] * case["output_len"] / elapsed_s, 2)}
        row |= {"input_tokens_per_s": round(case["num_prompts"] * case["input_len"] / elapsed_s, 2)}
        row |= {"steps_per_s": round(case["output_len"] / elapsed_s, 2)}
        if isinstance(sessions[0].engine, Quire) and session is not sessions[0]:  # compares runs of the same round
            ratios = [theirs / ours for theirs, ours in zip(its_times, times[0], strict=True)]
            row |= {"quire_speedup": round(statistics.median(ratios), 3)}
        if (its_costs := costs(session)) is not None:
            limit_s = its_costs.generation_s(limit, **case, max_num_batched_tokens=_BUDGET)
            row |= {"limit_s": round(limit_s, 4), "of_limit": round(limit_s / elapsed_s, 3)}
        yield row | speeds(limit)


_BUDGET = 2048
"""Prompt tokens in one step, for the limit."""


def own_costs(session: Session) -> WeightCosts | None:
    """Those of an engine of this project, which knows what its weights take; None for others."""
    return WeightCosts(**session.call("costs")) if isinstance(session.engine, Quire) else None


def speeds(machine: Limits) -> Row:
    """The machine's two speeds."""
    return {
        "read_gb_per_s": round(machine.read_bytes_per_s / 1e9, 1),
        "peak_gflop_per_s": round(machine.flops_per_s / 1e9),
    }

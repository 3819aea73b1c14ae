"""Finds the smallest fleet whose latencies stay within limits on a trace."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from quire.common.errors import ConfigError
from quire.interfaces.simulate.fleet.events import MAX_ENGINES
from quire.interfaces.simulate.fleet.simulator import FleetSimulator
from quire.interfaces.simulate.report import percentiles, share
from quire.interfaces.simulate.simulator import Simulator
from quire.interfaces.simulate.trace import TraceRequest

_UNITS_S = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NO_GAIN = 0.01
"""A fleet of twice the engines that is not faster by this share shows that more do not help."""


@dataclass(frozen=True, slots=True)
class Slo:
    """The limits, in seconds: of the time to the first token, and of the mean time between later tokens of a request.
    None: no limit."""

    ttft_s: float | None
    itl_s: float | None
    percentile: int = 95

    @classmethod
    def parse(cls, text: str, percentile: int = 95) -> Slo:
        """Read limits, for example `ttft=1s,itl=80ms`. Raises ConfigError."""
        found: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"\s*(ttft|itl)=([0-9]+\.?[0-9]*|\.[0-9]+)(s|ms|us)\s*", part)
            if match is None or match[1] in found or not float(match[2]):
                raise ConfigError(
                    f"--slo {text!r}: give ttft, itl or both, once, with a unit, for example ttft=1s,itl=80ms"
                )
            found[match[1]] = float(match[2]) * _UNITS_S[match[3]]
        if not 1 <= percentile <= 100:
            raise ConfigError(f"--percentile {percentile}: must be from 1 to 100")
        return cls(found.get("ttft"), found.get("itl"), percentile)

    def excess(self, ttft_s: float, itl_s: float) -> float:
        """Return the larger of the two times as a multiple of its limit; at most 1 where both are kept."""
        pairs = ((ttft_s, self.ttft_s), (itl_s, self.itl_s))
        return max([time_s / limit_s for time_s, limit_s in pairs if limit_s is not None])

    def __str__(self) -> str:
        limits = (("ttft", self.ttft_s), ("itl", self.itl_s))
        return ",".join([f"{name}={limit_s:g}s" for name, limit_s in limits if limit_s is not None])


@dataclass(frozen=True, slots=True)
class FleetPoint:
    """What a fleet of one size reaches."""

    degree: int
    engines: int
    ttft_s: float
    itl_s: float
    excess: float
    share: float
    """Share of requests within the limits."""
    busy: float
    """Share of time in which an engine computes."""

    @property
    def is_enough(self) -> bool:
        """Whether the limits are kept."""
        return self.excess <= 1


class FleetSearch:
    """Simulates fleets of different sizes on one trace, each once."""

    def __init__(
        self, trace: Iterable[TraceRequest], slo: Slo, make_engine: Callable[[int], Simulator], max_engines: int
    ) -> None:
        """`make_engine` makes an engine of a degree of tensor parallelism. Raises ConfigError for an empty trace."""
        if not 1 <= max_engines <= MAX_ENGINES:
            raise ConfigError(f"--max-engines {max_engines}: must be from 1 to {MAX_ENGINES}")
        self._trace = list(trace)
        if not self._trace:
            raise ConfigError("the trace has no requests")
        self._slo, self._make, self._max_engines = slo, make_engine, max_engines
        self._points: dict[tuple[int, int], FleetPoint] = {}

    def points(self, degree: int) -> list[FleetPoint]:
        """Return the points of the curve of this degree, by size: the smallest fleet that is enough, if one is, those
        on the way to it and a larger one."""
        last = None
        for engines in self._doubling():
            point = self._point(degree, engines)
            if point.is_enough:
                low = 0 if last is None else last.engines
                self._point(degree, min(self._max_engines, engines + max(1, engines // 2)))
                while engines - low > 1:
                    middle = (low + engines) // 2
                    low, engines = (low, middle) if self._point(degree, middle).is_enough else (middle, engines)
                break
            if last is not None and point.excess > last.excess * (1 - _NO_GAIN):
                break
            last = point
        return sorted([p for p in self._points.values() if p.degree == degree], key=lambda p: p.engines)

    def _doubling(self) -> Iterator[int]:
        engines = 1
        while engines < self._max_engines:
            yield engines
            engines *= 2
        yield self._max_engines

    def _point(self, degree: int, engines: int) -> FleetPoint:
        if (degree, engines) not in self._points:
            fleet = FleetSimulator(lambda: self._make(degree), engines)
            record, slo = fleet.run(self._trace), self._slo
            if not record.first_token_s:
                raise ConfigError("no request of the trace fits into an engine: give it more KV cache")
            p = slo.percentile
            ttft_s, itl_s = (
                percentiles(times, (p,), digits=9)[f"p{p}"] if times else 0.0
                for times in (record.first_token_s, record.per_token_s)
            )
            kept = [slo.excess(*times) <= 1 for times in zip(record.first_token_s, record.between_s, strict=True)]
            busy = share(sum([engine.busy_s for engine in fleet.engines.values()]), fleet.engine_s)
            num_asked = len(kept) + record.num_ignored
            excess = slo.excess(ttft_s, itl_s)
            self._points[degree, engines] = FleetPoint(
                degree, engines, ttft_s, itl_s, excess, share(sum(kept), num_asked), busy
            )
        return self._points[degree, engines]


def smallest(points: Iterable[FleetPoint]) -> FleetPoint | None:
    """Return the fleet that keeps the limits with the fewest processes, and then with the fewest engines."""
    enough = [point for point in points if point.is_enough]
    return min(enough, key=lambda point: (point.engines * point.degree, point.engines), default=None)


def refusal(points: Iterable[FleetPoint], slo: Slo) -> str:
    """Return what to say where no fleet is enough."""
    best = min(points, key=lambda point: point.excess)
    return (
        f"no fleet keeps {slo} at percentile {slo.percentile}: the nearest is {best.engines} engines of degree "
        f"{best.degree} with ttft={best.ttft_s:.4g}s,itl={best.itl_s:.4g}s; more engines do not help or exceed "
        "--max-engines. Allow more time, or use faster engines (--degrees, --costs)"
    )

"""What happens to the engines of a fleet besides requests: deaths, and engines that are added and removed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from quire.common.errors import ConfigError

MAX_ENGINES = 1000


@dataclass(frozen=True, slots=True)
class Deaths:
    """When engines die: at given times, and at random with a rate. A new engine takes the place of a dead one."""

    at: tuple[tuple[float, int], ...] = ()
    """(seconds since the start, number of the engine)"""
    per_engine_hour: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.per_engine_hour <= 3600:
            raise ConfigError(f"death rate {self.per_engine_hour:g}: must be from 0 to 3600 for each engine and hour")

    def delays_s(self, engine: int) -> Iterator[float]:
        """Yield the times that the engine of this number lives, one life after another; nothing without a rate."""
        rng = random.Random(f"deaths {self.seed} {engine}")
        while self.per_engine_hour:
            yield rng.expovariate(self.per_engine_hour / 3600)


@dataclass(frozen=True, slots=True)
class Scaling:
    """How many engines there are, by the number of unfinished requests.

    The number wanted is the smallest with which each has at most `target` requests. Further engines are started at
    once. Engines are removed after `patience_s` in which fewer were wanted, once they have finished their requests.
    """

    min_engines: int
    max_engines: int
    target: float = 16.0
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.min_engines <= self.max_engines <= MAX_ENGINES:
            raise ConfigError(
                f"from {self.min_engines} to {self.max_engines} engines: numbers must ascend from 1 to {MAX_ENGINES}"
            )
        if not 0 < self.target < math.inf:
            raise ConfigError(f"{self.target:g} requests for each engine: must be more than 0")

    def wanted(self, num_unfinished: int) -> int:
        """Return how many engines this number of requests needs."""
        return max(self.min_engines, min(self.max_engines, math.ceil(num_unfinished / self.target)))


def parse_deaths(text: str) -> tuple[tuple[float, int], ...]:
    """Read times of deaths, for example `10:0,25.5:3`. Raises ConfigError."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        deaths = tuple([(float(seconds), int(engine)) for seconds, engine in pairs])
    except ValueError:
        deaths = ()
    if not deaths or not all(0 <= seconds < math.inf and engine >= 0 for seconds, engine in deaths):
        raise ConfigError(f"deaths {text!r}: give SECONDS:ENGINE pairs, separated by commas, for example 10:0,25.5:3")
    return deaths

"""How the work is spread."""

import os
import re
from dataclasses import dataclass

from quire.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Threads of this process, and processes of this engine."""

    num_threads: int | None
    """threads for the kernels; None: as many as the CPU set and the container's quota allow"""
    tensor_parallel_size: int = 1
    executor: str = "in_process"
    """Which executor runs the batches; see quire.runner.executor."""
    cpus: tuple[int, ...] = ()
    """one for each thread, to be pinned there; none: as many threads as `num_threads` says, not pinned"""

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads={self.num_threads}: must be at least 1")
        if self.num_threads is not None and self.cpus:
            raise ConfigError("num_threads and cpu_list both say how many threads: give one")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported; on one machine num_threads "
                "uses all its cores"
            )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """`0,2-3` to (0, 2, 3). ConfigError unless each is a CPU that this process may use, named once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    cpus: list[int] = []
    for item in text.split(","):
        numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item.strip())
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if first > last:
            raise ConfigError(f"cpu_list={text!r}: write CPU numbers and ranges, as in 0,2-3")
        for cpu in range(first, last + 1):
            if cpu not in allowed or cpu in cpus:
                given = "named twice" if cpu in cpus else "not one that this process may use"
                raise ConfigError(f"cpu_list={text!r}: CPU {cpu} is {given}; allowed are {sorted(allowed)}, once each")
            cpus.append(cpu)
    return tuple(cpus)

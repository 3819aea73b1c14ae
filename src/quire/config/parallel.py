"""Configuration of threads and parallel processes."""

import os
import re
from dataclasses import dataclass

from quire.common.errors import ConfigError

MAX_ENGINES = 1024
BACKENDS = ("mp", "uni", "ray")
"""Where engines run: processes of this machine, which vLLM's `uni` means too, or actors of a Ray cluster."""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The threads of this process and the number of processes of this engine."""

    num_threads: int | None
    """Threads of the kernels; None for the number that the CPU set and the container's quota allow."""
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    """Engines among which requests are spread; each has such threads and processes of its own."""
    executor: str = "in_process"
    """Which executor runs the batches; see quire.runner.executor."""
    cpus: tuple[int, ...] = ()
    """CPUs that each get one thread pinned to them; if empty, `num_threads` threads run unpinned."""
    backend: str = "mp"
    """Where engines run, one of BACKENDS."""

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads={self.num_threads}: must be at least 1")
        if self.num_threads is not None and self.cpus:
            raise ConfigError("num_threads and cpu_list both set the number of threads: give one")
        if not 1 <= self.data_parallel_size <= MAX_ENGINES:
            raise ConfigError(f"data_parallel_size={self.data_parallel_size}: must be 1 to {MAX_ENGINES}")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported; num_threads sets the number "
                "of cores that are used"
            )


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse `0,2-3` into (0, 2, 3). Raises ConfigError unless each CPU may be used by this process and occurs once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    cpus: list[int] = []
    for item in text.split(","):
        numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item.strip())
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if first > last:
            raise ConfigError(f"cpu_list={text!r}: write CPU numbers and ranges, as in 0,2-3")
        for cpu in range(first, last + 1):
            if cpu not in allowed or cpu in cpus:
                problem = "listed twice" if cpu in cpus else "not available to this process"
                raise ConfigError(f"cpu_list={text!r}: CPU {cpu} is {problem}; allowed: {sorted(allowed)}, each once")
            cpus.append(cpu)
    return tuple(cpus)

"""How the work is spread."""

from dataclasses import dataclass

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """Threads of this process, and processes of this engine."""

    num_threads: int | None
    """threads for the kernels; None: as many as the CPU set and the container's quota allow"""
    tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError(f"num_threads={self.num_threads}: must be at least 1")
        if self.tensor_parallel_size != 1:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size}: only 1 is supported; on one machine num_threads "
                "uses all its cores"
            )

"""Configuration of threads and parallel processes."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from quire.common.errors import ConfigError

MAX_ENGINES = 1024
MAX_RANKS = 64
MAX_THREADS = 1024
MASTER_PORT = 29501
"""vLLM's `master_port`."""
ANY_CPU = "any"
"""As `cpu_list`: no thread is pinned."""
BACKENDS = ("mp", "uni", "ray")
"""Where engines run: processes of this machine, which vLLM's `uni` means too, or actors of a Ray cluster."""


Range = tuple[int, int]
"""The first index, and the one after the last."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One of the processes that compute a forward pass together."""

    rank: int = 0
    num_ranks: int = 1
    has_whole_experts: bool = False
    """Whether it has some of a layer's experts, and not a part of each."""

    def range_of(self, sizes: Sequence[int]) -> Range:
        """Where its part begins and ends, if each rank has a part of one of these sizes."""
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]


def cut(size: int, unit: int, num_ranks: int) -> tuple[int, ...]:
    """The size of each rank's part: as equal as whole units allow, larger ones first. Units are halved until each rank
    gets one. Raises ConfigError if there is less than 1 for each."""
    if size < num_ranks:
        raise ConfigError(
            f"tensor_parallel_size={num_ranks}: a layer has only {size} columns or heads to be divided: at most {size}"
        )
    while -(-size // unit) < num_ranks:
        unit //= 2
    num_units = -(-size // unit)
    ends = [min(size, sum(shares(num_units, num_ranks)[: rank + 1]) * unit) for rank in range(num_ranks)]
    return tuple(end - start for start, end in pairwise((0, *ends)))


def shares(count: int, num_parts: int) -> list[int]:
    """Parts that differ by at most 1, larger ones first."""
    return [count // num_parts + (part < count % num_parts) for part in range(num_parts)]


def divide_layers(layer_bytes: Sequence[int], num_stages: int) -> tuple[Range, ...]:
    """The layers of each stage: a stage ends where the bytes so far are nearest to its share of all, and has at least
    one layer. Raises ConfigError if there are fewer layers."""
    num_layers = len(layer_bytes)
    if num_layers < num_stages:
        raise ConfigError(
            f"pipeline_parallel_size={num_stages}: the model has {num_layers} layers, and a stage at least one: at "
            f"most {num_layers}"
        )
    ends = [0, *accumulate(layer_bytes)]
    cuts = [0]
    for stage in range(1, num_stages):
        share = ends[-1] * stage / num_stages
        allowed = range(cuts[-1] + 1, num_layers - (num_stages - stage) + 1)
        cuts.append(min(allowed, key=lambda end: abs(ends[end] - share)))
    return tuple(pairwise((*cuts, num_layers)))


def key_heads(num_kv_heads: int, shard: Shard) -> Range:
    """The heads of keys and values that a rank keeps. If there are more ranks than heads, several keep the same one."""
    if num_kv_heads >= shard.num_ranks:
        return shard.range_of(shares(num_kv_heads, shard.num_ranks))
    head = next(head for head in range(num_kv_heads) if shard.rank < sum(_sharers(num_kv_heads, shard)[: head + 1]))
    return head, head + 1


def query_heads(num_heads: int, num_kv_heads: int, shard: Shard) -> Range:
    """The heads of queries that a rank computes: those that read its heads of keys, or a part of them. Raises
    ConfigError if there are too few."""
    first, end = key_heads(num_kv_heads, shard)
    per_key = num_heads // num_kv_heads
    if num_kv_heads >= shard.num_ranks:
        return first * per_key, end * per_key
    sharers = _sharers(num_kv_heads, shard)
    if per_key < max(sharers):
        raise ConfigError(
            f"tensor_parallel_size={shard.num_ranks}: a layer has {num_heads} attention heads, {per_key} for each of "
            f"{num_kv_heads} heads of keys and values: at most {num_heads}"
        )
    of_head = Shard(shard.rank - sum(sharers[:first]), sharers[first])
    start, stop = of_head.range_of(shares(per_key, of_head.num_ranks))
    return first * per_key + start, first * per_key + stop


def _sharers(num_kv_heads: int, shard: Shard) -> list[int]:
    """How many ranks keep each head."""
    return shares(shard.num_ranks, num_kv_heads)


@dataclass(frozen=True, slots=True)
class NodesConfig:
    """The machines of an engine, and which one this is."""

    nnodes: int
    """Machines, each with one stage, or with an equal number of ranks of an engine without stages."""
    node_rank: int
    """Of this one. Machine 0 has the engine's own process, with the last stage or the first ranks. Machine n has the
    stage n - 1, or the n-th part of the ranks."""
    host: str
    port: int
    """Where machine 0 waits for the others."""
    secret_file: str | None
    num_ranks: int | None = None
    """The ranks of all machines together; None: each machine has a stage."""

    @property
    def num_connections(self) -> int:
        """Of each machine with machine 0: for messages, and for what ranks gather."""
        return 1 if self.num_ranks is None else 2

    @property
    def master_addr(self) -> str:
        """Host and port, as they were given."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @classmethod
    def read(
        cls,
        nnodes: int,
        node_rank: int,
        master_addr: str | None,
        secret_file: str | None,
        num_stages: int,
        num_ranks: int = 1,
    ) -> "NodesConfig | None":
        """The arguments of that name; None for one machine. Raises ConfigError if they do not fit together."""
        if nnodes < 1 or not 0 <= node_rank < nnodes:
            raise ConfigError(f"nnodes={nnodes}, node_rank={node_rank}: must be 1 or more, and 0 to nnodes - 1")
        if nnodes == 1:
            return None
        divides_ranks = num_stages == 1 and num_ranks > 1 and num_ranks % nnodes == 0
        if num_stages != nnodes and not divides_ranks:
            raise ConfigError(
                f"nnodes={nnodes} needs pipeline_parallel_size={nnodes}, or 1 and a tensor_parallel_size that is a "
                f"multiple of {nnodes}; given: pipeline_parallel_size={num_stages} and tensor_parallel_size={num_ranks}"
            )
        given = master_addr or ""
        if ":" not in given or given.endswith("]"):  # which ends an IPv6 address
            given = f"{given}:{MASTER_PORT}"
        host, _, port = given.rpartition(":")
        if not _is_host(host) or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"nnodes={nnodes}: master_addr={master_addr!r} must be HOST:PORT of machine 0")
        return cls(nnodes, node_rank, host.strip("[]"), int(port), secret_file, num_ranks if divides_ranks else None)


def _is_host(text: str) -> bool:
    """Whether the system can look it up: names have an encoding, which limits their parts."""
    try:
        return bool(text.encode("idna"))
    except UnicodeError:
        return False


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """The threads of this process and the number of processes of this engine."""

    num_threads: int | None
    """Threads of the kernels in each rank; None for what the CPU set and the container's quota allow, in all."""
    tensor_parallel_size: int = 1
    """Processes that compute each step together, this one included."""
    data_parallel_size: int = 1
    """Engines among which requests are spread; each has such threads and processes of its own."""
    executor: str | None = None
    """Which executor runs the batches; see quire.runner.executor. None: the one for this number of ranks."""
    cpus: tuple[int, ...] = ()
    """CPUs that each get one thread pinned to them; if empty, `num_threads` threads run unpinned."""
    pins_ranks: bool = True
    """Whether ranks and stages get CPUs of their own where `cpus` is empty."""
    pipeline_parallel_size: int = 1
    """Stages of layers that compute each step one behind the other, this process's the last one. Each has
    `tensor_parallel_size` processes."""
    stages: tuple[Range, ...] = ()
    """The layers of each stage, as the memory plan divides them."""
    nodes: NodesConfig | None = None
    """The machines of the stages or ranks. None: all are on this one."""
    enable_expert_parallel: bool = False
    """Whether ranks divide the experts of a layer among them, and not each expert."""
    backend: str = "mp"
    """Where engines run, one of BACKENDS."""

    def __post_init__(self) -> None:
        if self.num_threads is not None:
            check_threads(self.num_threads)
        if self.num_threads is not None and self.cpus:
            raise ConfigError("num_threads and cpu_list both set the number of threads: give one")
        for kind, most in (("data", MAX_ENGINES), ("tensor", MAX_RANKS), ("pipeline", MAX_RANKS)):
            if not 1 <= (size := getattr(self, f"{kind}_parallel_size")) <= most:
                raise ConfigError(f"{kind}_parallel_size={size}: must be 1 to {most}")
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            raise ConfigError(
                "enable_expert_parallel=True: experts are divided among the processes of tensor_parallel_size, "
                "which is 1; set it to 2 or more, or leave enable_expert_parallel out"
            )
        if self.nodes is not None and self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size}: only one engine can have nnodes={self.nodes.nnodes}"
            )
        if self.nodes is not None and self.backend == "ray":
            raise ConfigError(
                f"nnodes={self.nodes.nnodes}: Ray chooses the nodes of an engine's stages "
                "(distributed_executor_backend='ray'); leave it at 1"
            )

    def shard(self, rank: int) -> Shard:
        """A rank of each stage."""
        return Shard(rank, self.tensor_parallel_size, self.enable_expert_parallel)

    @property
    def own_stages(self) -> tuple[Range, ...]:
        """The stages of this machine."""
        return self.stages if self.nodes is None else self.stages[-1:]

    @property
    def num_machines(self) -> int:
        """The machines among which the ranks of each stage are divided."""
        return 1 if self.nodes is None or self.nodes.num_ranks is None else self.nodes.nnodes

    @property
    def own_ranks(self) -> int:
        """The ranks of a stage on this machine."""
        return self.tensor_parallel_size // self.num_machines

    @property
    def executor_name(self) -> str:
        """The name of the executor."""
        if self.executor is not None:
            return self.executor
        if self.pipeline_parallel_size > 1:
            return "pipeline"
        return "in_process" if self.tensor_parallel_size == 1 else "ranks"


def check_threads(count: int, cpus: Sequence[int] = ()) -> None:
    """Raise ConfigError unless `count` is within the limits and `cpus` is empty or names as many CPUs, all of which
    this process may use."""
    if not 1 <= count <= MAX_THREADS:
        raise ConfigError(f"num_threads={count}: must be 1 to {MAX_THREADS}")
    if cpus and (len(cpus) != count or not set(cpus) <= _usable_cpus()):
        allowed = sorted(_usable_cpus())
        raise ConfigError(f"cpus={list(cpus)}: must be {count} of the CPUs that this process may use, {allowed}")


def _usable_cpus() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Parse `0,2-3` into (0, 2, 3), and `any` into none. Raises ConfigError unless each CPU may be used by this process
    and occurs once."""
    if text == ANY_CPU:
        return ()
    allowed = _usable_cpus()
    cpus: list[int] = []
    for item in text.split(","):
        numbers = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", item.strip())
        first, last = (int(numbers[1]), int(numbers[2] or numbers[1])) if numbers else (1, 0)
        if first > last:
            raise ConfigError(f"cpu_list={text!r}: write CPU numbers and ranges, as in 0,2-3, or any")
        for cpu in range(first, last + 1):
            if cpu not in allowed or cpu in cpus:
                problem = "listed twice" if cpu in cpus else "not available to this process"
                raise ConfigError(f"cpu_list={text!r}: CPU {cpu} is {problem}; allowed: {sorted(allowed)}, each once")
            cpus.append(cpu)
    return tuple(cpus)

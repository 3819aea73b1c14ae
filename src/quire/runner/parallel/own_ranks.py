"""The ranks of an engine, or of one of its stages, on this machine: processes, of which this is the first."""

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace

from quire import kernels
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.config.parallel import Shard
from quire.runner.parallel.configs import to_bytes
from quire.runner.parallel.links import ChildProcess, LaunchRank, Links
from quire.runner.parallel.messages import Start
from quire.runner.parallel.placing import rank_threads
from quire.runner.sampling.sampler import MAX_LOGITS_ROWS
from quire.runner.worker import Worker, make_worker

_SLOT_BYTES = 512 * 1024
"""Of what a rank shows the others at once: few enough for the caches that ranks share."""


class OwnRanks:
    """This process's rank, and links to the others on this machine."""

    def __init__(
        self,
        config: EngineConfig,
        count: int,
        *,
        first: int = 0,
        launch: LaunchRank = ChildProcess,
        patience_s: float = 0,
    ) -> None:
        """Starts the others. Of all ranks, `count` are on this machine, and `first` is this process's. It waits for
        other ranks for at most `patience_s`; 0: for ever."""
        self._config, self._first, self._count, self._patience_s = config, first, count, patience_s
        num_ranks = config.parallel.tensor_parallel_size
        self._slot_bytes = max(_SLOT_BYTES, 4 * config.model.vocab_size)
        scheduler, logits_bytes = config.scheduler, 0
        if count == num_ranks:  # pages are taken when they are first written to
            num_logits = max(scheduler.max_num_seqs + scheduler.max_draft_rows, MAX_LOGITS_ROWS)
            logits_bytes = 4 * num_logits * config.model.vocab_size
        memory = _unnamed_file(kernels.rank_memory_bytes(num_ranks, self._slot_bytes, logits_bytes))
        self._memory, others = memory, count - 1
        self.links = Links([None] * others, 0, [lambda sock: launch(sock, memory)] * others, "rank", first + 1)
        ends = ExitStack()
        ends.callback(os.close, memory)
        ends.callback(self.links.close)
        self.close: Callable[[], None] = ends.close
        """Ends the other ranks. It does not refer to this object, whose worker may refer to an executor."""
        self.cpus: tuple[int, ...] = ()
        """Those of this process's rank, if ranks are pinned."""
        self.ranks: kernels.Ranks
        self.worker: Worker

    def load(self, kv_cache: KVCacheConfig, sockets: Sequence[int] = ()) -> None:
        """Load the model in this process, while the others do so, too. `sockets` lead to other machines. Raises what
        loading raises."""
        parallel, count = self._config.parallel, self._count
        shards = [parallel.shard(self._first + rank) for rank in range(count)]
        threads = [parallel if count == 1 else rank_threads(parallel, Shard(rank, count)) for rank in range(count)]
        configs = [replace(self._config, parallel=each) for each in threads]
        self.cpus = configs[0].parallel.cpus
        caches = [kv_cache.of_rank(shard) for shard in shards]
        shares = [to_bytes(*share) for share in zip(configs, caches, strict=True)]
        starts = [Start(s.rank, share, self._slot_bytes) for s, share in zip(shards, shares, strict=True)]
        self.links.send_each(starts[1:])
        own = (self._first, self._first + count) if sockets else None
        self.ranks = kernels.Ranks.join(
            shards[0], self._memory, self._slot_bytes, self._patience_s, own=own, sockets=sockets
        )
        self.links.when_lost = self.ranks.stop
        self.worker = make_worker(configs[0], caches[0], self.ranks)


def _unnamed_file(num_bytes: int) -> int:
    """The descriptor of a file of zeros in memory, which is gone when all have closed it."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("quire-ranks")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor

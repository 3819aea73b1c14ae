"""Rank 0 of an engine of several ranks: the executor that the engine calls."""

import weakref
from dataclasses import replace
from pathlib import Path

from quire import kernels
from quire.common.batch import Batch, ScheduledSequence, StepResult, encode
from quire.common.errors import EngineBrokenError, error_named
from quire.common.params import PoolerInfo
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.config.parallel import Shard
from quire.runner.parallel.configs import to_bytes
from quire.runner.parallel.links import PATIENCE_S, ChildProcess, Launch, Links
from quire.runner.parallel.messages import DraftPass, LoadAdapter, Restart, Start, Step, UnloadAdapter
from quire.runner.parallel.placing import rank_threads
from quire.runner.worker import States, make_worker

_SLOT_BYTES = 512 * 1024
"""Of what a rank shows the others at once: few enough for the caches that ranks share."""


class RanksExecutor:
    """Computes each step in this process and others, of which each has a part of the model and of the KV cache.

    All get the same batch and run the same kernels, which wait for each other where parts are put together. This one
    alone draws. A failure anywhere fails the step in all of them, and they begin anew. If a rank ends, so does this:
    each call raises EngineBrokenError.
    """

    pooler: PoolerInfo | None = None

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig, launch: Launch = ChildProcess) -> None:
        """Start the ranks, and load the model in all. Raises what loading raises."""
        num_ranks = config.parallel.tensor_parallel_size
        slot_bytes = max(_SLOT_BYTES, 4 * config.model.vocab_size)
        links = self._links = Links(num_ranks, kernels.rank_memory_bytes(num_ranks, slot_bytes), launch)
        self._finalizer = weakref.finalize(self, links.close)
        try:
            shards = [Shard(rank, num_ranks) for rank in range(num_ranks)]
            configs = [replace(config, parallel=rank_threads(config.parallel, shard)) for shard in shards]
            caches = [kv_cache.of_rank(shard) for shard in shards]
            shares = [to_bytes(*share) for share in zip(configs, caches, strict=True)]
            links.send_each([Start(r, num_ranks, slot_bytes, share) for r, share in enumerate(shares[1:], start=1)])
            ranks = self._ranks = kernels.Ranks.join(shards[0], links.memory, slot_bytes, PATIENCE_S)
            links.when_lost = ranks.stop
            self._worker = make_worker(configs[0], caches[0], ranks)
            self._worker.lead_drafts(self._send_pass)
            for failure in links.wait():
                raise error_named(failure.kind, failure.text)
        except BaseException:
            self.close()
            raise

    def execute(self, batch: Batch, states: States = ()) -> StepResult:
        """As Worker."""
        self._links.send(Step(encode(batch), tuple(map(memoryview, states))))
        try:
            return self._worker.execute(batch, states)
        except BaseException:
            self._begin_anew()
            raise

    def states(self) -> States:
        """As Worker: all ranks have the same."""
        return self._worker.states()

    def _send_pass(self, sequences: tuple[ScheduledSequence, ...], rows: list[int], is_first: bool) -> None:
        self._links.send(DraftPass(encode(Batch(0, sequences)), rows, is_first))

    def _begin_anew(self) -> None:
        """Bring all ranks out of what they are computing. Raises the error of a rank that failed, if one did."""
        self._ranks.stop()
        self._links.send(Restart())
        failures = self._links.wait()
        self._ranks.restart()
        for failure in failures:
            raise error_named(failure.kind, failure.text)

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """As Executor, in all ranks."""
        self._worker.load_adapter(slot, folder, digest)
        self._links.send(LoadAdapter(slot, folder, digest))
        failures = self._links.wait()
        if failures:
            self.unload_adapter(slot)
            raise error_named(failures[0].kind, failures[0].text)

    def unload_adapter(self, slot: int) -> None:
        """As Executor, in all ranks."""
        self._worker.unload_adapter(slot)
        self._links.send(UnloadAdapter(slot))
        if failures := self._links.wait():
            raise EngineBrokenError(f"a rank could not unload an adapter: {failures[0].text}")

    def close(self) -> None:
        """End the other ranks."""
        self._finalizer()

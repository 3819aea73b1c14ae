"""Rank 0 of an engine of several ranks: the executor that the engine calls."""

import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from quire.common import liveness
from quire.common.batch import Batch, ScheduledSequence, StepResult, encode
from quire.common.errors import EngineBrokenError, error_named
from quire.common.params import PoolerInfo
from quire.config.args import EngineConfig
from quire.config.kv_cache import KVCacheConfig
from quire.runner.parallel.configs import to_bytes
from quire.runner.parallel.links import PATIENCE_S, ChildProcess, LaunchRank, Links, check_loaded
from quire.runner.parallel.machines.nodes import admit, fingerprint
from quire.runner.parallel.messages import (
    DraftPass,
    Failed,
    LoadAdapter,
    Message,
    Restart,
    Start,
    Step,
    UnloadAdapter,
)
from quire.runner.parallel.own_ranks import OwnRanks
from quire.runner.parallel.placing import move_thread
from quire.runner.worker import States


class RanksExecutor:
    """Computes each step in this process and others, of which each has a part of the model and of the KV cache.

    All get the same batch and run the same kernels, which wait for each other where parts are put together. This one
    alone returns tokens. A failure anywhere fails the step in all of them, and they begin anew. If a rank ends, so does
    this: each call raises EngineBrokenError.
    """

    pooler: PoolerInfo | None = None

    def __init__(self, config: EngineConfig, kv_cache: KVCacheConfig, launch: LaunchRank = ChildProcess) -> None:
        """Start the ranks, await those of other machines, and load the model in all. Raises what loading raises."""
        nodes, count = config.parallel.nodes, config.parallel.own_ranks
        joined = [] if nodes is None else admit(nodes, fingerprint(config.model))
        wires = [wire for _, wire in joined]
        config = replace(config, parallel=replace(config.parallel, nodes=None))
        machines = self._machines = Links([None] * len(joined), 0, [sock for sock, _ in joined], "machine", 1)
        own = OwnRanks(config, count, launch=launch, patience_s=PATIENCE_S)
        self._links = own.links
        self._finalizer = liveness.Finalizer(self, _close, (machines.close, own.close), wires)
        try:
            share = to_bytes(config, kv_cache)
            limit_s = liveness.hang_timeout_s
            starts = [Start(count * (1 + number), share, hang_timeout_s=limit_s) for number in range(len(joined))]
            machines.send_each(starts)
            own.load(kv_cache, [wire.fileno() for wire in wires])
            self._ranks, self._worker, self._cpus = own.ranks, own.worker, own.cpus
            machines.when_lost = own.ranks.stop
            self._worker.lead_drafts(self._send_pass, self._begin_anew)
            check_loaded([*own.links.wait(), *machines.wait()])
        except BaseException:
            self.close()
            raise

    def execute(self, batch: Batch, states: States = ()) -> StepResult:
        """As Worker."""
        if self._cpus:
            move_thread(self._cpus)
        self._send_next(Step(encode(batch), tuple(map(memoryview, states))))
        try:
            return self._worker.execute(batch, states)
        except BaseException as error:
            for failure in self._begin_anew():
                raise error_named(failure.kind, failure.text) from error
            raise

    def states(self) -> States:
        """As Worker: all ranks have the same."""
        return self._worker.states()

    def _send_pass(self, sequences: tuple[ScheduledSequence, ...], rows: list[int], is_first: bool) -> None:
        self._send_next(DraftPass(encode(Batch(0, sequences)), rows, is_first))

    def _send_next(self, message: Step | DraftPass) -> None:
        self._ranks.begin()
        self._send(message)

    def _send(self, message: Message) -> None:
        self._finalizer.check()
        self._machines.send(message)
        self._links.send(message)

    def _wait(self) -> list[Failed]:
        return [*self._links.failures(), *self._machines.failures()]

    def _begin_anew(self) -> list[Failed]:
        """Bring all ranks out of what they are computing. Returns what failed in them."""
        self._ranks.stop()
        self._send(Restart())
        failures = self._wait()
        self._ranks.restart()
        return failures

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """As Executor, in all ranks."""
        self._worker.load_adapter(slot, folder, digest)
        self._send(LoadAdapter(slot, folder, digest))
        failures = self._wait()
        if failures:
            self.unload_adapter(slot)
            raise error_named(failures[0].kind, failures[0].text)

    def unload_adapter(self, slot: int) -> None:
        """As Executor, in all ranks."""
        self._worker.unload_adapter(slot)
        self._send(UnloadAdapter(slot))
        if failures := self._wait():
            raise EngineBrokenError(f"a rank could not unload an adapter: {failures[0].text}")

    def close(self) -> None:
        """End the other ranks."""
        self._finalizer()


def _close(ends: Sequence[Callable[[], object]], wires: Sequence[socket.socket]) -> None:
    for wire in wires:  # a thread that waits for parts of other ranks then reads the end
        with contextlib.suppress(OSError):  # the other machine may have closed it
            wire.shutdown(socket.SHUT_RDWR)
    for end in ends:
        end()
    for wire in wires:
        wire.close()

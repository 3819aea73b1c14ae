"""The queue of requests whose grammars are being compiled. This module does not import torch."""

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from itertools import chain, islice

import msgspec

from quire.common.batch import Draw
from quire.common.errors import failure
from quire.common.log import logger
from quire.common.params.base import shares_of
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.unfinished import UnfinishedRequests
from quire.text.grammar.compiler import Compilation, GrammarCompiler, rejection

COMPILE_LIMIT_S = 20.0
"""Time limit of one compilation, from when a thread begins it. The library's own limits end a compilation sooner; this
one guards against bugs in it."""

MAX_BYTES_IN_USE = 8 * 1024**2
"""Limit on the source text of all grammars in use. A compiled grammar takes up to fifty times its source's size."""


class GrammarQueue:
    """Keeps requests until their grammars are compiled, and then adds them to the scheduler.

    A grammar is in use from its compilation to the end of its request. While those in use leave too little memory for
    another one, its request waits; the API key with the least memory in use is served first, and of its tenants too.

    A request whose grammar fails, or takes too long, ends with the status FINISHED_IGNORED and an error message.
    """

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float] = time.monotonic) -> None:
        self.compiler = compiler
        self.clock = clock
        self._held: dict[SequenceGroup, int] = {}  # waiting for memory, with the bytes of the source
        self._in_use: dict[SequenceGroup, int] = {}  # those being compiled or run, with the same
        self._in_use_by = Counter[str]()  # these bytes by API key and by tenant
        self._num_in_use = 0  # all these bytes
        self._waiting: dict[SequenceGroup, Compilation] = {}
        self._deadlines: dict[SequenceGroup, float] = {}  # of the compilations that a thread has begun
        self._failed: list[SequenceGroup] = []
        self._served: list[str] = []  # keys and tenants with held requests, the last one that was served at the end

    def __len__(self) -> int:
        """Requests that wait, or have failed and were not yet reported by `take_failed`."""
        return len(self._held) + len(self._waiting) + len(self._failed)

    def __bool__(self) -> bool:
        return bool(self._held or self._waiting or self._failed)

    def queued(self, limit: int) -> list[SequenceGroup]:
        """At most `limit` of the waiting requests."""
        return list(islice(chain(self._waiting, self._held), limit))

    def add(self, group: SequenceGroup) -> None:
        """Add a new request and compile its grammar as soon as there is memory."""
        self._held[group] = len(msgspec.json.encode(group.params.structured_outputs))
        self._begin()

    def _begin(self) -> None:
        """Start the compilations for which there is memory, always from the tenants with the least in use."""
        while (group := self._next()) is not None:
            params, num_bytes = group.params, self._held.pop(group)
            assert params.structured_outputs is not None
            self._in_use[group] = num_bytes
            names = shares_of(params.tenant)
            self._in_use_by.update(dict.fromkeys(names, num_bytes))
            self._num_in_use += num_bytes
            waiting = {name for held in self._held for name in shares_of(held.params.tenant)}
            self._served = [name for name in self._served if name in waiting and name not in names]
            self._served += names
            jumps = _jumps(group.seqs[0].draws[0])
            self._waiting[group] = self.compiler.submit(params.structured_outputs, params.tenant, jumps=jumps)

    def _next(self) -> SequenceGroup | None:
        """The first request, of the keys and their tenants that use the least memory, whose grammar fits into what is
        left. Of two such tenants the one comes first whose key, or which itself, was served longer ago.

        Where none of them fits, tenants that use more wait too: they would take the memory that is becoming free.
        """
        total, turns = self._num_in_use, {name: turn for turn, name in enumerate(self._served, start=1)}
        names = {group: shares_of(group.params.tenant) for group in self._held}
        in_use = {group: [self._in_use_by[name] for name in names[group]] for group in self._held}
        least = min(in_use.values(), default=[])
        candidates = [group for group in self._held if in_use[group] == least]
        candidates.sort(key=lambda group: [turns.get(name, 0) for name in names[group]])
        fitting = (group for group in candidates if not total or total + self._held[group] <= MAX_BYTES_IN_USE)
        return next(fitting, None)

    def forget(self, group: SequenceGroup) -> None:
        """A request has ended, and the memory of its grammar is free."""
        num_bytes = self._in_use.pop(group, 0)
        self._num_in_use -= num_bytes
        for name in shares_of(group.params.tenant) if num_bytes else ():
            self._in_use_by[name] -= num_bytes
            if not self._in_use_by[name]:
                del self._in_use_by[name]

    def remove(self, group: SequenceGroup) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        if group in self._failed:
            self._failed.remove(group)
            return True
        return self._discard(group)

    def _discard(self, group: SequenceGroup) -> bool:
        """Remove a waiting request; cancels its compilation unless it has begun. Returns False if it is not waiting."""
        compilation = self._waiting.pop(group, None)
        self._deadlines.pop(group, None)
        if compilation is not None:
            compilation.cancel()
        return compilation is not None or self._held.pop(group, None) is not None

    def wait(self, timeout_s: float) -> None:
        """Wait until a compilation has ended, at most `timeout_s`."""
        wait_for(list(self._waiting.values()), timeout_s, FIRST_COMPLETED)

    def admit(self, requests: UnfinishedRequests, wait_s: float = 0.0) -> None:
        """Add the requests whose grammars are ready to those that the scheduler knows. If it knows none, wait for a
        compilation to end first, at most `wait_s`."""
        if wait_s and not requests:
            self.wait(wait_s)
        if self._held:
            self._begin()
        for group, compilation in list(self._waiting.items()):
            if compilation.done():
                group.error = rejection(compilation)
            elif self._is_late(group, compilation):
                group.error = f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s: make it simpler"
            else:
                continue
            self._discard(group)
            (seq,) = group.seqs
            if group.error is None and self._start(group, seq, compilation):
                requests.add(group)
                continue
            if not seq.status.is_finished:
                seq.finish(SequenceStatus.FINISHED_IGNORED)
            group.metrics.finished_time = self.clock()
            self._failed.append(group)

    @staticmethod
    def _start(group: SequenceGroup, seq: Sequence, compilation: Compilation) -> bool:
        """Give the sequence its grammar. Returns False, with the group's error set, if that fails."""
        try:
            seq.grammar = compilation.result()
            for token_id in seq.output.token_ids:  # generated by an engine that was replaced
                seq.grammar.advance(token_id)
        except Exception as error:
            group.error = failure(group.request_id, "when its grammar was compiled", error)
            logger.error("%s", group.error, exc_info=error)
            seq.finish(SequenceStatus.FINISHED_ABORTED)
        return group.error is None

    def _is_late(self, group: SequenceGroup, compilation: Compilation) -> bool:
        """Time spent waiting for a thread does not count: a simple grammar is not refused because others are slow."""
        if not (compilation.running() or compilation.done()):
            return False
        now = self.clock()
        return now > self._deadlines.setdefault(group, now + COMPILE_LIMIT_S)

    def take_failed(self) -> list[SequenceGroup]:
        """The requests that have failed since the last call."""
        failed, self._failed = self._failed, []
        return failed


def _jumps(draw: Draw) -> bool:
    """Whether a token that the grammar forces may be appended without a draw: only if nothing else depends on the draw,
    such as log-probabilities, or could forbid the token."""
    return (
        draw.logprobs is None
        and draw.allowed_token_ids is None
        and not (draw.bad_words or draw.processors or draw.min_tokens)
    )

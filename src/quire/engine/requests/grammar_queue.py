"""Requests whose grammars are being compiled. No torch here."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from itertools import chain, islice

import msgspec

from quire.common.batch import Draw
from quire.common.errors import failure
from quire.common.log import logger
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus
from quire.engine.scheduling.scheduler import Scheduler
from quire.text.grammar.compiler import Compilation, GrammarCompiler

COMPILE_LIMIT_S = 20.0
"""from when a thread begins: the library's own limits end a compilation sooner, this one is for its bugs"""

MAX_BYTES_IN_USE = 8 * 1024**2
"""of the sources of the grammars of all requests, to the end of each; compiled, they take up to fifty times as much"""


class GrammarQueue:
    """Holds requests back until their grammars are compiled; the scheduler does not know them before.

    While those in use take too much memory, no more are compiled but such as still fit.

    A request whose grammar fails, or takes too long, ends with the status FINISHED_IGNORED and says why.
    """

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float] = time.monotonic) -> None:
        self.compiler = compiler
        self.clock = clock
        self._held: dict[SequenceGroup, int] = {}  # whose compilation has to wait: bytes of the source
        self._in_use: dict[SequenceGroup, int] = {}  # the same of the others, whether they wait or run
        self._waiting: dict[SequenceGroup, Compilation] = {}
        self._deadlines: dict[SequenceGroup, float] = {}  # of those that have begun
        self._failed: list[SequenceGroup] = []

    def __len__(self) -> int:
        """Requests that wait, or whose end nobody has been told."""
        return len(self._held) + len(self._waiting) + len(self._failed)

    def queued(self, limit: int) -> list[SequenceGroup]:
        """So many of those that wait, at most."""
        return list(islice(chain(self._waiting, self._held), limit))

    def prepare(self) -> None:
        """Load what the first grammar would load, which takes up to a second in which no step could run."""
        self.compiler.prepare()

    def add(self, group: SequenceGroup) -> None:
        """Have a new request's grammar compiled."""
        self._held[group] = len(msgspec.json.encode(group.params.structured_outputs))
        self._begin()

    def _begin(self) -> None:
        """Have those compiled for which there is memory."""
        num_in_use = sum(self._in_use.values())
        for group, num_bytes in list(self._held.items()):
            if num_in_use and num_in_use + num_bytes > MAX_BYTES_IN_USE:
                continue
            num_in_use += num_bytes
            self._in_use[group] = self._held.pop(group)
            params = group.params
            assert params.structured_outputs is not None
            jumps = _jumps(group.seqs[0].draws[0])
            self._waiting[group] = self.compiler.submit(params.structured_outputs, params.tenant, jumps=jumps)

    def forget(self, group: SequenceGroup) -> None:
        """A request has ended: its grammar takes no memory any more."""
        self._in_use.pop(group, None)

    def remove(self, group: SequenceGroup) -> bool:
        """Forget a request; False if it is not here."""
        if group in self._failed:
            self._failed.remove(group)
            return True
        return self._give_up(group)

    def _give_up(self, group: SequenceGroup) -> bool:
        """What nobody waits for any more, and no thread has begun, is not compiled: it would keep others waiting."""
        compilation = self._waiting.pop(group, None)
        self._deadlines.pop(group, None)
        if compilation is not None:
            compilation.future.cancel()
        return compilation is not None or self._held.pop(group, None) is not None

    def wait(self, timeout_s: float) -> None:
        """Until a compilation has ended."""
        wait_for([compilation.future for compilation in self._waiting.values()], timeout_s, FIRST_COMPLETED)

    def admit(self, scheduler: Scheduler) -> None:
        """Hand the scheduler the requests whose grammars are ready."""
        if self._held:
            self._begin()
        for group, compilation in list(self._waiting.items()):
            if compilation.is_done:
                group.error = compilation.error
            elif self._is_late(group, compilation):
                group.error = f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s: make it simpler"
            else:
                continue
            self._give_up(group)
            (seq,) = group.seqs
            if group.error is None and self._start(group, seq, compilation):
                scheduler.add(group)
                continue
            if not seq.status.is_finished:
                seq.finish(SequenceStatus.FINISHED_IGNORED)
            group.metrics.finished_time = self.clock()
            self._failed.append(group)

    @staticmethod
    def _start(group: SequenceGroup, seq: Sequence, compilation: Compilation) -> bool:
        """Whether the sequence has its grammar now, or else has failed."""
        try:
            seq.grammar = compilation.state
            for token_id in seq.output.token_ids:  # of its past in another engine
                seq.grammar.advance(token_id)
        except Exception as error:
            group.error = failure(group.request_id, "when its grammar was compiled", error)
            logger.error("%s", group.error, exc_info=error)
            seq.finish(SequenceStatus.FINISHED_ABORTED)
        return group.error is None

    def _is_late(self, group: SequenceGroup, compilation: Compilation) -> bool:
        """Waiting for other grammars does not count: what is simple is not refused because theirs are slow."""
        if not compilation.has_begun:
            return False
        now = self.clock()
        return now > self._deadlines.setdefault(group, now + COMPILE_LIMIT_S)

    def take_failed(self) -> list[SequenceGroup]:
        """The requests that have failed since."""
        failed, self._failed = self._failed, []
        return failed


def _jumps(draw: Draw) -> bool:
    """Whether forced tokens are appended without a draw: not where more is wanted of one, or it may be forbidden."""
    return (
        draw.logprobs is None
        and draw.allowed_token_ids is None
        and not (draw.bad_words or draw.processors or draw.min_tokens)
    )

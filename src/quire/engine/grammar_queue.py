"""Requests whose grammars are being compiled. No torch here."""

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED
from concurrent.futures import wait as wait_for
from itertools import islice

from quire.batch import Draw
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import SequenceGroup, SequenceStatus
from quire.errors import failure
from quire.grammar.compiler import Compilation, GrammarCompiler

COMPILE_LIMIT_S = 20.0
"""from when a thread begins: the library's own limits end a compilation sooner, this one is for its bugs"""


class GrammarQueue:
    """Holds requests back until their grammars are compiled; the scheduler does not know them before.

    A request whose grammar fails, or takes too long, ends with the status FINISHED_IGNORED and says why.
    """

    def __init__(self, compiler: GrammarCompiler, clock: Callable[[], float] = time.monotonic) -> None:
        self.compiler = compiler
        self.clock = clock
        self._waiting: dict[SequenceGroup, Compilation] = {}
        self._deadlines: dict[SequenceGroup, float] = {}  # of those that have begun
        self._failed: list[SequenceGroup] = []

    def __len__(self) -> int:
        """Requests that wait, or whose end nobody has been told."""
        return len(self._waiting) + len(self._failed)

    def queued(self, limit: int) -> list[SequenceGroup]:
        """So many of those that wait, at most."""
        return list(islice(self._waiting, limit))

    def prepare(self) -> None:
        """Load what the first grammar would load, which takes up to a second in which no step could run."""
        self.compiler.prepare()

    def add(self, group: SequenceGroup) -> None:
        """Have a new request's grammar compiled."""
        assert group.params.structured_outputs is not None
        jumps = _jumps(group.seqs[0].draws[0])
        self._waiting[group] = self.compiler.submit(group.params.structured_outputs, group.params.tenant, jumps=jumps)

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
        return compilation is not None

    def wait(self, timeout_s: float) -> None:
        """Until a compilation has ended."""
        wait_for([compilation.future for compilation in self._waiting.values()], timeout_s, FIRST_COMPLETED)

    def admit(self, scheduler: Scheduler) -> None:
        """Hand the scheduler the requests whose grammars are ready."""
        for group, compilation in list(self._waiting.items()):
            if compilation.is_done:
                group.error = compilation.error
            elif self._is_late(group, compilation):
                group.error = f"the grammar was not compiled within {COMPILE_LIMIT_S:g} s: make it simpler"
            else:
                continue
            self._give_up(group)
            (seq,) = group.seqs
            if group.error is None:
                try:
                    seq.grammar = compilation.state
                    for token_id in seq.token_ids[seq.num_prompt_tokens :]:  # of its past in another engine
                        seq.grammar.advance(token_id)
                except Exception as error:
                    group.error = failure(group.request_id, "when its grammar was begun", error)
            if group.error is None:
                scheduler.add(group)
            else:
                seq.status = SequenceStatus.FINISHED_IGNORED
                group.metrics.finished_time = self.clock()
                self._failed.append(group)

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

"""Failures: of the internal accounting, which break the engine, and of steps, whose cause is found by running only some
of the requests."""

from collections.abc import Iterable, Set

from quire.common.errors import EngineBrokenError
from quire.engine.requests.sequence import SequenceGroup

MAX_CONSECUTIVE_FAILURES = 5
"""Requests that may fail alone without a step in between that succeeds. With more, the requests are not the cause."""


class Accounting:
    """A context for changes of the engine's internal accounting. An exception in it leaves the accounting inconsistent:
    the engine is broken. Not a generator, as `failures_named`: every step is in one."""

    def __init__(self) -> None:
        self.error: EngineBrokenError | None = None
        """Why the engine is broken, here or otherwise; None while it works."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception):
            self.error = EngineBrokenError(f"internal accounting is inconsistent: {type(error).__name__}: {error}")
            raise self.error from error

    def interrupt(self) -> None:
        """A step was interrupted in the middle of whatever it did: the engine is broken, if it was not before."""
        self.error = self.error or EngineBrokenError(
            "a step was interrupted before its end, and its requests may be half changed: make a new engine. One "
            "Ctrl-C waits for the end of a step; a second one, or an exception from another thread, does not"
        )


class FailureIsolator:
    """Narrows the requests of failing steps down to one, by halves.

    One failure may be chance: the same requests are tried again. After the second, only half of the step's requests
    run, and so on, while the others wait; no request's tokens depend on which others run. A request that is alone in a
    failing step becomes a candidate: it waits until a step without it succeeds, which shows that the engine works, or
    until no other request is left, and is then tried alone once more. If that fails, it is the culprit. Where the
    failure does not come back, there is none, and all requests run again.
    """

    def __init__(self) -> None:
        self.candidates: list[SequenceGroup] = []
        self.num_consecutive_failures = 0
        """Requests that failed alone, and failures without any request, since the last step that succeeded."""
        self._trial: frozenset[SequenceGroup] | None = None  # the requests that may run, without candidates; None: all
        self._narrowed: list[SequenceGroup] = []  # the requests of the step that failed
        self._has_failed = False
        self._tries_candidate = False  # the first of them runs alone

    def to_run(self, groups: Iterable[SequenceGroup]) -> Set[SequenceGroup] | None:
        """The requests, of all `groups`, that may run in the next step; None for all."""
        if not self.candidates:
            return self._trial
        others = {group for group in self._trial or groups if group not in self.candidates}
        self._tries_candidate = self._tries_candidate or not others
        return {self.candidates[0]} if self._tries_candidate else others

    def failed(self, groups: list[SequenceGroup]) -> SequenceGroup | None:
        """A step of these requests failed. Returns the culprit, if it is known by now."""
        if self._tries_candidate and groups:
            return self._next_candidate()
        if not groups:
            self.num_consecutive_failures += 1
        elif not self._has_failed:
            self._has_failed = True
        elif len(groups) > 1:
            self._narrow(groups)
        else:
            self._narrow([])
            self.candidates.append(groups[0])
            self.num_consecutive_failures += 1
        return None

    def succeeded(self, *, has_run: bool) -> None:
        """A step succeeded, and `has_run` says whether any request ran in it: the culprit is none of those."""
        if has_run:
            self.num_consecutive_failures = 0
        if self._tries_candidate:
            self._next_candidate()
            return
        if not self._has_failed and not self.candidates:
            return
        tried = self._trial or ()
        self._tries_candidate = bool(self.candidates) and (has_run or self._trial is None)
        self._narrow([group for group in self._narrowed if group not in tried and not group.is_finished])

    def _next_candidate(self) -> SequenceGroup:
        tried = self.candidates.pop(0)
        self._tries_candidate = bool(self.candidates)
        return tried

    def _narrow(self, groups: list[SequenceGroup]) -> None:
        """Try half of these next: from the other end where the last half did not lead to success."""
        self._narrowed, self._has_failed = groups, bool(groups)
        middle = max(1, len(groups) // 2)
        half = groups[-middle:] if len(self.candidates) % 2 else groups[:middle]
        self._trial = frozenset(half) if groups else None

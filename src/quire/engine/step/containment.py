"""Which request makes steps fail: found out by letting only some of them run."""

from collections.abc import Iterable, Set

from quire.engine.requests.sequence import SequenceGroup

MAX_IN_VAIN = 5
"""requests that may fail alone, one after another, without a step that succeeds between them; if there are more, it is
not the requests"""


class Suspects:
    """Narrows those that run in failing steps to one, by halves.

    One failure may be chance: all is tried again. After the second only half of the step's requests run, and so on, and
    whoever is not suspected waits; no request's tokens depend on its company. The one that is alone in a step that
    fails is accused: it waits until a step without it succeeds, so that the engine is known to be in order, or until
    there is nobody else to run, and is tried alone once more. If that fails it is guilty. Where the failure does not
    come back nobody is, and all run again.
    """

    def __init__(self) -> None:
        self.accused: list[SequenceGroup] = []
        self.num_in_vain = 0
        """requests that failed alone, and failures of nobody, since a step succeeded"""
        self._trial: frozenset[SequenceGroup] | None = None  # who may run, of those not accused; None: all
        self._suspects: list[SequenceGroup] = []
        self._has_failed = False
        self._tries_accused = False  # the first of them in each step

    def to_run(self, groups: Iterable[SequenceGroup]) -> Set[SequenceGroup] | None:
        """Who of all requests may run in the next step; None: all."""
        if not self.accused:
            return self._trial
        others = {group for group in self._trial or groups if group not in self.accused}
        self._tries_accused = self._tries_accused or not others
        return {self.accused[0]} if self._tries_accused else others

    def failed(self, groups: list[SequenceGroup]) -> SequenceGroup | None:
        """A step of these failed. Returns who is guilty, if that is known by now."""
        if self._tries_accused and groups:
            return self._next_accused()
        if not groups:
            self.num_in_vain += 1
        elif not self._has_failed:
            self._has_failed = True
        elif len(groups) > 1:
            self._narrow(groups)
        else:
            self._narrow([])
            self.accused.append(groups[0])
            self.num_in_vain += 1
        return None

    def succeeded(self, *, has_run: bool) -> None:
        """A step succeeded, and was it of anybody? It is none of those that were to run in it."""
        if has_run:
            self.num_in_vain = 0
        if self._tries_accused:
            self._next_accused()
            return
        tried = self._trial or ()
        self._tries_accused = bool(self.accused) and (has_run or self._trial is None)
        self._narrow([group for group in self._suspects if group not in tried and not group.is_finished])

    def _next_accused(self) -> SequenceGroup:
        tried = self.accused.pop(0)
        self._tries_accused = bool(self.accused)
        return tried

    def _narrow(self, suspects: list[SequenceGroup]) -> None:
        """Half of them is tried next: from the other end where the one before has brought no success."""
        self._suspects, self._has_failed = suspects, bool(suspects)
        middle = max(1, len(suspects) // 2)
        half = suspects[-middle:] if len(self.accused) % 2 else suspects[:middle]
        self._trial = frozenset(half) if suspects else None

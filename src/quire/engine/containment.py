"""Which request makes steps fail: found out by letting only some of them run."""

from quire.engine.sequence import SequenceGroup

MAX_IN_VAIN = 5
"""requests that may be ended one after another without a step that succeeds between them; if there are more, it is not
the requests"""


class Suspects:
    """Narrows those that run in failing steps to one, by halves.

    One failure may be chance: all is tried again. After the second only half of the step's requests run, and so on, and
    whoever is not suspected waits; no request's tokens depend on its company. The one that is alone in a step that
    fails is to be ended. Where the failure does not come back nobody is, and all run again.
    """

    def __init__(self) -> None:
        self.trial: frozenset[SequenceGroup] | None = None
        """who may run in the next step; None: all"""
        self._suspects: list[SequenceGroup] = []
        self._has_failed = False

    def failed(self, groups: list[SequenceGroup]) -> SequenceGroup | None:
        """A step of these failed. Returns the one to be ended, if it is known by now."""
        if not self._has_failed:
            self._has_failed = True
        elif len(groups) > 1:
            self._narrow(groups)
        else:
            self._narrow([])
            return groups[0]
        return None

    def succeeded(self) -> None:
        """A step succeeded, or there was none for those that were to run: it is none of them."""
        tried = self.trial or ()
        self._narrow([group for group in self._suspects if group not in tried and not group.is_finished])

    def _narrow(self, suspects: list[SequenceGroup]) -> None:
        self._suspects, self._has_failed = suspects, bool(suspects)
        self.trial = frozenset(suspects[: max(1, len(suspects) // 2)]) if suspects else None

"""How much time searches for drafts may take."""

_SHARE = 0.01
"""Of the time of all steps, what searches may take that save nothing."""
_LARGE_SHARE = 0.05
"""Of a step, what searches for all of its sequences may take without being scarce."""
_MOST_STEPS = 1.0
"""Steps whose time is saved up, or owed, at most."""
SHORTEST_STEP_S = 4e-3
"""Of models whose steps are shorter, drafts save less than recording their shapes and looking for them takes."""


class SearchTime:
    """The time that is left for searches: a share of all steps' time, and half of what accepted drafts have saved.

    So a small model, whose steps are hardly longer than a search, loses no more than that share where nothing is found.
    """

    def __init__(self, shortest_step_s: float = 0.0) -> None:
        """Nothing is searched while steps are shorter than `shortest_step_s`."""
        self._shortest_step_s = shortest_step_s
        self._left_s = 0.0
        self._each_s = 0.0
        self._step_s = 0.0
        self._token_s = 0.0

    @property
    def is_left(self) -> bool:
        """Whether a search may start now."""
        return self._left_s >= 0.0 and self._step_s >= self._shortest_step_s

    def is_scarce(self, num_sequences: int) -> bool:
        """Whether searches for this number of sequences would take a large share of each step."""
        return num_sequences * self._each_s > _LARGE_SHARE * self._step_s

    def spend(self, seconds: float, num_searches: int) -> None:
        """This number of searches took this long."""
        if num_searches:
            self._each_s = seconds / num_searches
        self._left_s = max(self._left_s - seconds, -_MOST_STEPS * self._step_s)

    def observe_steps(self, seconds: float, num_steps: int, num_sequences: int) -> None:
        """Each of this number of steps took this long, with this number of sequences."""
        self._step_s, self._token_s = seconds, seconds / max(1, num_sequences)
        self._add(_SHARE * seconds * num_steps)

    def observe_accepted(self, num_tokens: int) -> None:
        """This number of drafts of a sequence was right."""
        self._add(0.5 * num_tokens * self._token_s)

    def _add(self, seconds: float) -> None:
        self._left_s = min(self._left_s + seconds, _MOST_STEPS * self._step_s)

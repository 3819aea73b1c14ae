"""Finding any of several strings in text that arrives piece by piece."""

from collections import deque
from functools import lru_cache


class StopStrings:
    """An automaton over all stop strings at once (Aho and Corasick 1975): linear in the text, however it is cut.

    A state is a number, 0 at the start, and stands for the longest end of the text read so far that begins some stop
    string. Immutable once made, so one automaton serves many sequences.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._found: list[str | None] = [None]
        self._depth = [0]
        for string in strings:
            self._insert(string)
        self._link()

    def held_back(self, state: int) -> int:
        """How many of the last characters read could still become a stop string."""
        return self._depth[state]

    def read(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Go on from `state` over `text`. Returns (new state, characters read, stop string that ends there or None).

        Reading stops at the first character that completes a stop string; of several ending there, the longest counts.
        So the answer does not depend on how the text is cut into pieces.
        """
        for position, char in enumerate(text, start=1):
            state = self._advance(state, char)
            found = self._found[state]
            if found is not None:
                return state, position, found
        return state, len(text), None

    def skip(self, state: int, text: str) -> int:
        """The state after `text`, whatever stop strings end in it."""
        for char in text:
            state = self._advance(state, char)
        return state

    def _advance(self, state: int, char: str) -> int:
        while state and char not in self._edges[state]:
            state = self._fallback[state]
        return self._edges[state].get(char, 0)

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._edges[state]:
                self._edges[state][char] = len(self._edges)
                self._edges.append({})
                self._fallback.append(0)
                self._found.append(None)
                self._depth.append(self._depth[state] + 1)
            state = self._edges[state][char]
        self._found[state] = string

    def _link(self) -> None:
        """Point each state at the longest shorter end of it that also begins a stop string, breadth first."""
        waiting = deque(self._edges[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._edges[state].items():
                fallback = self._advance(self._fallback[state], char)
                self._fallback[child] = fallback
                if self._found[child] is None:
                    self._found[child] = self._found[fallback]
                waiting.append(child)


@lru_cache(maxsize=16)
def stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton for `strings`, shared by the requests of a batch."""
    return StopStrings(strings)

"""Finds any of several stop strings in text that arrives in pieces."""

from collections import deque
from functools import lru_cache


class StopStrings:
    """An automaton for several stop strings (Aho and Corasick 1975), in time linear in the text.

    A state is a number, 0 at the start. It stands for the longest ending of the text so far that is the beginning of a
    stop string. The automaton is immutable, so many sequences can share it.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        self._edges: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._found: list[str | None] = [None]
        self._depth = [0]
        for string in strings:
            self._insert(string)
        self._link()

    def num_undecided(self, state: int) -> int:
        """Return the number of last characters that could still become a stop string."""
        return self._depth[state]

    def read(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Read `text` from `state`. Returns (new state, characters read, completed stop string or None).

        Reading ends at the first character that completes a stop string, or the longest of several. So the result does
        not depend on how the text is split into pieces.
        """
        for position, char in enumerate(text, start=1):
            state = self._advance(state, char)
            found = self._found[state]
            if found is not None:
                return state, position, found
        return state, len(text), None

    def skip(self, state: int, text: str) -> int:
        """Return the state after `text`, ignoring stop strings in it."""
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
        """Link each state to its longest proper ending that is also the beginning of a stop string, breadth first."""
        waiting = deque(self._edges[0].values())
        while waiting:
            state = waiting.popleft()
            for char, child in self._edges[state].items():
                fallback = self._advance(self._fallback[state], char)
                self._fallback[child] = fallback
                if self._found[child] is None:
                    self._found[child] = self._found[fallback]
                waiting.append(child)


stop_strings = lru_cache(maxsize=16)(StopStrings)
"""Returns the automaton for a tuple of strings, which requests share."""

"""Reads text that arrives in pieces, with results that do not depend on where it is split."""

import re
from collections.abc import Callable, Collection, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A part of a parser: it yields where it needs more text, and returns what it found."""
Sink = Callable[[str], object]
"""Receives text while it arrives."""


class Reader:
    """A buffer of unread text, and of held text, which was read but may still be released as content.

    The caller of a Reading calls `push` or `end` and then resumes it. Nothing is read twice, and no primitive
    waits for more than a few characters (a tag, an escape, a number), so a parser made of them takes linear time.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._held: list[str] | None = None

    def push(self, text: str) -> None:
        """Add text at the end."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    @property
    def num_waiting(self) -> int:
        """Characters pushed and not read."""
        return len(self._text) - self._at

    def hold(self, text: str = "") -> None:
        """Hold all text that is read from now on, after `text`, for `release`; drop what was held before."""
        self._held = [text]

    def release(self) -> str:
        """Return the held text and stop holding."""
        held, self._held = "".join(self._held or ()), None
        return held

    @property
    def is_blank(self) -> bool:
        """Whether the held text is only white space."""
        return not any(piece.strip() for piece in self._held or ())

    def ends_with(self, text: str) -> bool:
        """Whether the rest of the whole text is `text`."""
        return self._ended and self._text[self._at :] == text

    def take(self, num_chars: int) -> str:
        """Read `num_chars` characters, which must be in the buffer."""
        text = self._text[self._at : self._at + num_chars]
        self._at += num_chars
        if self._held is not None:
            self._held.append(text)
        return text

    def ahead(self, num_chars: int = 1) -> Reading[str]:
        """The next characters, not read yet; fewer only at the end of the text."""
        while self.num_waiting < num_chars and not self._ended:
            yield
        return self._text[self._at : self._at + num_chars]

    def run_ahead(self, pattern: re.Pattern[str], max_chars: int) -> Reading[str]:
        """The next characters that match, each by itself, not read yet; `max_chars` of them at most."""
        while True:
            match = pattern.match(self._text, self._at, self._at + max_chars)
            num_chars = match.end() - self._at if match else 0
            if num_chars < self.num_waiting or num_chars == max_chars or self._ended:
                return self._text[self._at : self._at + num_chars]
            yield

    def match(self, literal: str) -> Reading[bool]:
        """Read `literal` if it is next, otherwise nothing."""
        while True:
            text = self._text[self._at : self._at + len(literal)]
            if text == literal:
                self.take(len(literal))
                return True
            if self._ended or not literal.startswith(text):
                return False
            yield

    def match_any(self, literals: Collection[str]) -> Reading[str]:
        """Read the first of the literals that is next, and return it, otherwise nothing."""
        for literal in literals:
            if (yield from self.match(literal)):
                return literal
        return ""

    def run(self, pattern: re.Pattern[str], sink: Sink | None = None) -> Reading[None]:
        """Read the characters that match the pattern, which must be one for runs of single characters."""
        while True:
            match = pattern.match(self._text, self._at)
            if match:
                text = self.take(match.end() - self._at)
                if sink is not None:
                    sink(text)
            if self.num_waiting or self._ended:
                return
            yield

    def until(self, tags: Collection[str], sink: Sink) -> Reading[str]:
        """Read up to the end of the first of the tags, pass the text before it to the sink, and return the tag, or ""
        if there is none. No tag may begin within another one."""
        while True:
            places = {self._text.find(tag, self._at): tag for tag in tags}
            places.pop(-1, None)
            if places:
                found = min(places)
                sink(self.take(found - self._at))
                return self.take(len(places[found]))
            sink(self.take(self.num_waiting - (0 if self._ended else max(map(self._overlap, tags), default=0))))
            if self._ended:
                return ""
            yield

    def rest(self, sink: Sink) -> Reading[None]:
        """Read all remaining text, including text that arrives later."""
        while True:
            sink(self.take(self.num_waiting))
            if self._ended:
                return
            yield

    def _overlap(self, tag: str) -> int:
        """Number of characters at the end that could begin `tag`."""
        for num_chars in range(min(len(tag) - 1, self.num_waiting), 0, -1):
            if self._text.endswith(tag[:num_chars]):
                return num_chars
        return 0

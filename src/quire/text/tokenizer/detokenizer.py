"""Incremental detokenization: the text of a sequence while its tokens are generated."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from quire.common.faults import fault_point
from quire.text.tokenizer.stop_strings import stop_strings

if TYPE_CHECKING:
    from quire.text.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns tokens into text one by one and finds stop strings, in time linear in the output.

    The text is what the output adds to the prompt's text: after a prompt, a SentencePiece token keeps its leading
    space, and a character that the prompt left incomplete is completed. Without a prompt it is
    `tokenizer.decode(output)`. Without stop strings, text is made only when it is read, which may be during the next
    step.
    """

    __slots__ = (
        "_include_stop", "_num_free", "_num_undecided", "_pieces", "_state", "_stopped", "_stops", "_stream", "_waiting"
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        """A stop string that ends within the first `min_tokens` tokens is ignored."""
        self._stream = tokenizer.stream(
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._num_free = min_tokens  # following tokens in which stop strings are ignored
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop_str_in_output
        self._pieces: list[str] = []
        self._state = 0
        self._num_undecided = 0
        self._stopped = False
        self._waiting: list[int] = []  # tokens not yet turned into text

    def fork(self) -> IncrementalDetokenizer:
        """Return an independent copy with the same history."""
        other = copy(self)
        other._stream, other._pieces = self._stream.fork(), list(self._pieces)
        other._waiting = list(self._waiting)
        return other

    def append(self, token_id: int) -> str | None:
        """Append a token. Returns the stop string that it completes, after which nothing may be appended; else None.

        The text then ends before the stop string, or after it with include_stop_str_in_output.
        """
        assert not self._stopped, "the sequence has ended with a stop string"
        fault_point("detokenizer.append")
        if self._stops is None:
            self._waiting.append(token_id)
            return None
        piece = self._stream.push(token_id)
        is_free, self._num_free = self._num_free > 0, self._num_free - 1
        if not piece:
            return None
        if is_free:
            self._pieces.append(piece)
            self._state = self._stops.skip(self._state, piece)
            self._num_undecided = self._stops.num_undecided(self._state)
            return None
        self._state, num_read, found = self._stops.read(self._state, piece)
        self._pieces.append(piece[:num_read])
        if found is None:
            self._num_undecided = self._stops.num_undecided(self._state)
            return None
        self._stopped, self._num_undecided = True, 0
        if not self._include_stop:
            self._pieces = [self._settled()[: -len(found)]]
        return found

    @property
    def text(self) -> str:
        """All text so far; an incomplete character at the end is shown as U+FFFD."""
        return self._settled() if self._stopped else self._settled() + self._stream.pending()

    def stable_text(self, finished: bool) -> str:
        """Return the part of the text that no further token can change, which is all of it once `finished`.

        An incomplete character at the end, and an ending that could become a stop string, are left out.
        """
        if finished:
            return self.text
        text = self._settled()
        return text[: -self._num_undecided] if self._num_undecided else text

    def _settled(self) -> str:
        """Return the pieces as one string, and keep them joined."""
        fault_point("detokenizer.text")
        self._pieces += [self._stream.push(token_id) for token_id in self._waiting]
        self._waiting.clear()
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

"""The text of one sequence while its tokens come."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from quire.common.faults import fault_point
from quire.text.tokenizer.stop_strings import stop_strings

if TYPE_CHECKING:
    from quire.text.tokenizer.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns tokens into text as they come and looks for stop strings, in time linear in the output.

    The text is what the output adds to the prompt's: after a prompt, a SentencePiece token keeps its leading space, and
    a character that the prompt left unfinished is completed. After no prompt it is `tokenizer.decode(output)`. Without
    stop strings, text is made when it is asked for: it decides nothing, and may come while the next step runs.
    """

    __slots__ = (
        "_held_back",
        "_include_stop",
        "_num_free",
        "_pieces",
        "_state",
        "_stopped",
        "_stops",
        "_stream",
        "_waiting",
    )

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
        """A stop string does not count where it ends within the first `min_tokens` tokens."""
        self._stream = tokenizer.stream(
            prompt_token_ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        self._num_free = min_tokens  # tokens from here on that cannot stop
        self._stops = stop_strings(tuple(stop)) if stop else None
        self._include_stop = include_stop_str_in_output
        self._pieces: list[str] = []
        self._state = 0
        self._held_back = 0
        self._stopped = False
        self._waiting: list[int] = []  # tokens to make text of

    def fork(self) -> IncrementalDetokenizer:
        """One with the same past that goes on by itself."""
        other = copy(self)
        other._stream, other._pieces = self._stream.fork(), list(self._pieces)
        other._waiting = list(self._waiting)
        return other

    def append(self, token_id: int) -> str | None:
        """Take the next token. Returns the stop string it completed, if any; nothing may be appended after one.

        The text then ends right before the stop string, or right behind it with include_stop_str_in_output.
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
            self._held_back = self._stops.held_back(self._state)
            return None
        self._state, num_read, found = self._stops.read(self._state, piece)
        self._pieces.append(piece[:num_read])
        if found is None:
            self._held_back = self._stops.held_back(self._state)
            return None
        self._stopped, self._held_back = True, 0
        if not self._include_stop:
            self._pieces = [self._settled()[: -len(found)]]
        return found

    @property
    def text(self) -> str:
        """All text so far; an unfinished character at its end shows as U+FFFD."""
        return self._settled() if self._stopped else self._settled() + self._stream.pending()

    def stable_text(self, finished: bool) -> str:
        """The part of the text that no further token can change or take back: all of it once `finished`.

        Holds back an unfinished character and any end of the text that could still become a stop string.
        """
        if finished:
            return self.text
        text = self._settled()
        return text[: -self._held_back] if self._held_back else text

    def _settled(self) -> str:
        """The pieces as one string; joined once, then kept joined."""
        fault_point("detokenizer.text")
        self._pieces += [self._stream.push(token_id) for token_id in self._waiting]
        self._waiting.clear()
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

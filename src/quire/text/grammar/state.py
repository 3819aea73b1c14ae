"""The state of a sequence in its grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.text.grammar.trial import reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class MaskShape:
    """The vocabulary sizes of the model and of the library, which may differ."""

    vocab_size: int
    library_vocab_size: int
    """Vocabulary size of the library; at least that of the model."""
    hidden_token_ids: tuple[int, ...] = ()
    """Tokens that are never allowed: the library's end-of-sequence token if the model has none."""

    def fill(self, matcher: LLMatcher, words: npt.NDArray[np.int32]) -> None:
        """Write the library's mask, restricted to the model's tokens, into `words`."""
        if self.library_vocab_size == self.vocab_size:
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        else:
            library_words = np.empty(-(-self.library_vocab_size // 32), np.int32)
            matcher.unsafe_compute_mask_ptr(library_words.ctypes.data, library_words.nbytes)
            words[:] = library_words[: len(words)]
            if num_bits := self.vocab_size % 32:
                words[-1] &= (1 << num_bits) - 1
        for token_id in self.hidden_token_ids:
            words.view(np.uint32)[token_id // 32] &= ~np.uint32(1 << token_id % 32)


@dataclass(slots=True)
class _Lexer:
    """What a state and its copies share: the structures that the library builds while it runs, and its limits."""

    start: Callable[[], LLMatcher]
    """Makes a matcher that shares nothing with others."""
    is_shared: bool = False
    """Whether there were copies, of samples, beams or drafts."""


class GrammarState:
    """A sequence's place in its grammar, which depends on the tokens generated so far and nothing else.

    Commit advances it with every token that it appends, and forks have states of their own. A grammar never raises: if
    it turns out to be too complex, `error` gives the reason and `advance` returns False. Samples of one request are
    copies, drafts are tried on copies, and what these add to the library's structures counts towards its limits. If a
    grammar fails that had copies, it starts anew, once, and does what it would have done alone (ADR 0113).
    """

    __slots__ = ("_lexer", "_matcher", "_may_start_anew", "_shape", "_token_ids", "jumps")

    def __init__(self, start: Callable[[], LLMatcher], shape: MaskShape, *, jumps: bool = True) -> None:
        self._lexer = _Lexer(start)
        self._matcher = start()
        self._shape = shape
        self._token_ids = list[int]()
        self._may_start_anew = True
        self.jumps = jumps
        """Whether `forced_tokens` returns tokens, which are then appended without sampling."""

    def fork(self) -> GrammarState:
        """Return an independent copy of this state, which shares the structures that the library builds."""
        self._lexer.is_shared = True
        fork = copy(self)
        fork._matcher, fork._token_ids = self._matcher.deep_copy(), self._token_ids.copy()
        return fork

    def trial(self) -> GrammarState | None:
        """Return a copy on which drafts are tried; None if the grammar has failed because of copies."""
        if not self._may_start_anew:
            return None
        trial = self.fork()
        trial._may_start_anew = False
        return trial

    def mask(self) -> npt.NDArray[np.int32]:
        """[ceil(vocab_size / 32)]: bit `token_id % 32` of word `token_id // 32` is set if the token may come next.

        The end-of-sequence tokens are among them exactly where the output may end. After an error all bits are set,
        since the drawn token will not be accepted. Other Python threads run meanwhile.
        """
        words = np.empty(-(-self._shape.vocab_size // 32), np.int32)
        self._shape.fill(self._matcher, words)
        if self._starts_anew():
            self._shape.fill(self._matcher, words)
        if self._matcher.is_error():
            words[:] = -1
        return words

    def advance(self, token_id: int) -> bool:
        """Append a token. Returns False, after which the state is unusable, if the grammar forbids it or fails."""
        if token_id < 0:
            return False
        if not self._matcher.consume_token(token_id):
            if not self._starts_anew():
                return False
            self.mask()  # as before this token alone
            if not self._matcher.consume_token(token_id):
                return False
        self._token_ids.append(token_id)
        return True

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these drafts may follow one after another, up to the first that may not."""
        trial = self.trial()
        return 0 if trial is None else trial._matcher.validate_tokens(list(token_ids))

    def forced_tokens(self, *, always: bool = False) -> list[int]:
        """Return the tokens that must come next, as the tokenizer splits their text; empty if there is a choice.

        Each of them is the only token that the mask at its position allows. Only with `jumps`, or `always`.
        """
        if not (self.jumps or always):
            return []
        forced = self._matcher.compute_ff_tokens()
        return self._matcher.compute_ff_tokens() if self._starts_anew() else forced

    def _starts_anew(self) -> bool:
        """Whether the grammar had failed, may have done so because of copies, and has not after all its tokens without
        them. With the masks and forced tokens in between, its structures are those of a grammar that had no copies."""
        if not (self._may_start_anew and self._lexer.is_shared and self._matcher.is_error()):
            return False
        self._lexer, self._may_start_anew = _Lexer(self._lexer.start), False
        self._matcher = self._lexer.start()
        place = 0
        while place < len(self._token_ids):
            forced = self._matcher.compute_ff_tokens() if self.jumps and place else []
            if not forced:
                self.mask()
            end = place + max(1, len(forced))
            self._matcher.consume_tokens(self._token_ids[place:end])
            place = end
        return not self._matcher.is_error()

    @property
    def may_end(self) -> bool:
        """Whether the output so far is complete."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the output is complete and no token can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the grammar has failed; None if it has not."""
        if not self._matcher.is_error():
            return None
        return reason(self._matcher.get_error()) or "the grammar library gave no reason"

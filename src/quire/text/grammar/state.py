"""Where a sequence stands in its grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from quire.text.grammar.trial import reason

if TYPE_CHECKING:
    from llguidance import LLMatcher


@dataclass(frozen=True, slots=True)
class MaskShape:
    """How many tokens the model has, and what the library thinks of them."""

    vocab_size: int
    library_vocab_size: int
    """as many or more"""
    hidden_token_ids: tuple[int, ...] = ()
    """never allowed: what the library takes for the end-of-sequence token where the model has none"""

    def fill(self, matcher: LLMatcher, words: npt.NDArray[np.int32]) -> None:
        """The library's mask of the tokens that the model has."""
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


class GrammarState:
    """A sequence's place in its grammar, which depends on the tokens generated so far and nothing else.

    Commit advances it with every token that it appends; forks have a state of their own. Nothing raises on account of
    a grammar: where one turns out to be too complex to go on with, `error` says so and `advance` answers False.
    """

    __slots__ = ("_matcher", "_shape", "jumps")

    def __init__(self, matcher: LLMatcher, shape: MaskShape, *, jumps: bool = True) -> None:
        self._matcher = matcher
        self._shape = shape
        self.jumps = jumps
        """forced tokens are told, to be appended without a draw"""

    def fork(self) -> GrammarState:
        """A state in the same place, which goes its own way from there. What the library builds as it goes, the two
        build together, and its limits hold for both: a request's forks fail together."""
        return GrammarState(self._matcher.deep_copy(), self._shape, jumps=self.jumps)

    def mask(self) -> npt.NDArray[np.int32]:
        """[ceil(vocab_size / 32)]: bit `token_id % 32` of word `token_id // 32` is set if the token may come next.

        The end-of-sequence tokens are among them exactly where the output may end. After an error all bits are set,
        since the drawn token will not be accepted. Other Python threads run meanwhile.
        """
        words = np.empty(-(-self._shape.vocab_size // 32), np.int32)
        self._shape.fill(self._matcher, words)
        if self._matcher.is_error():
            words[:] = -1
        return words

    def advance(self, token_id: int) -> bool:
        """Go on with a token; False, and the end of this state, if the grammar does not allow it or fails."""
        return token_id >= 0 and self._matcher.consume_token(token_id)

    def forced_tokens(self) -> list[int]:
        """The only tokens that can follow, as the tokenizer would cut their text; none if there is a choice.

        They are the ones that the masks would leave, one after another.
        """
        return self._matcher.compute_ff_tokens() if self.jumps else []

    @property
    def may_end(self) -> bool:
        """The output so far is a whole sentence."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """It is one that nothing can follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the state cannot go on, if it cannot."""
        if not self._matcher.is_error():
            return None
        return reason(self._matcher.get_error()) or "the grammar library does not say why"

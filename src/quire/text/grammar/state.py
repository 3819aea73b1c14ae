"""The state of a sequence in its grammar."""

from __future__ import annotations

from collections.abc import Sequence
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


class GrammarState:
    """A sequence's place in its grammar, which depends on the tokens generated so far and nothing else.

    Commit advances it with every token that it appends, and forks have states of their own. A grammar never raises: if
    it turns out to be too complex, `error` gives the reason and `advance` returns False.
    """

    __slots__ = ("_matcher", "_shape", "jumps")

    def __init__(self, matcher: LLMatcher, shape: MaskShape, *, jumps: bool = True) -> None:
        self._matcher = matcher
        self._shape = shape
        self.jumps = jumps
        """Whether `forced_tokens` returns tokens, which are then appended without sampling."""

    def fork(self) -> GrammarState:
        """Return an independent copy of this state.

        The two share the structures that the library builds while it runs, and its limits apply to both together, so
        the forks of a request fail together.
        """
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
        """Append a token. Returns False, after which the state is unusable, if the grammar forbids it or fails."""
        return token_id >= 0 and self._matcher.consume_token(token_id)

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these tokens may follow one after another, up to the first that may not. A copy looks at
        them: a grammar that fails at one of them may not have to."""
        return self._matcher.deep_copy().validate_tokens(list(token_ids))

    def forced_tokens(self, *, always: bool = False) -> list[int]:
        """Return the tokens that must come next, as the tokenizer splits their text; empty if there is a choice.

        Each of them is the only token that the mask at its position allows. Only with `jumps`, or `always`.
        """
        return self._matcher.compute_ff_tokens() if self.jumps or always else []

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

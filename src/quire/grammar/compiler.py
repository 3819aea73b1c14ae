"""Grammars, compiled beside the step loop and kept for the next request."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import LifoQueue
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from quire.errors import InvalidParamsError
from quire.faults import fault_point
from quire.grammar.fair_threads import FairThreads
from quire.grammar.state import GrammarState, MaskShape
from quire.grammar.trial import TRIAL_LIMIT_S, TrialProcess, TrialSettings, parser_limits
from quire.params import StructuredOutputsParams
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_CACHED_GRAMMARS = 256
MAX_CACHED_BYTES = 2 * 1024**2
"""of the sources of the grammars kept; compiled, a grammar takes up to forty times as much"""
_NUM_THREADS = 2
_WORDS = "[a-z]{1,10}"
"""tokens that the library takes or leaves all at once where a grammar allows them all: most of those that a regular
expression for words or names allows. Masks stay the same"""


@dataclass(frozen=True, slots=True, eq=False)
class Compilation:
    """A grammar that is being compiled, or has been."""

    future: Future[GrammarState]

    @property
    def is_done(self) -> bool:
        """`state` and `error` can be asked for."""
        return self.future.done()

    @property
    def has_begun(self) -> bool:
        """It does not wait for other grammars any more."""
        return self.future.running() or self.future.done()

    @property
    def error(self) -> str | None:
        """Why it failed, if it did."""
        if self.future.cancelled():
            return "nobody waited for the grammar any more"
        error = self.future.exception()
        if error is None or isinstance(error, InvalidParamsError):
            return None if error is None else str(error)
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"[:400]  # panics of the library too

    def state(self, *, jumps: bool) -> GrammarState:
        """A new sequence's place in the grammar: the start."""
        return self.future.result().fork(jumps=jumps)


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in threads of its own, and keeps those asked for last.

    The library is loaded, and told the vocabulary, when the first grammar is asked for. One thread calls `submit`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        trial_limit_s: int = TRIAL_LIMIT_S,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._threads: FairThreads[GrammarState] = FairThreads(_NUM_THREADS, "quire-grammar")
        self._trials: LifoQueue[TrialProcess] = LifoQueue()
        num_tokens = max(vocab_size, tokenizer.vocab_size)
        for _ in range(_NUM_THREADS):
            self._trials.put(TrialProcess(TrialSettings(num_tokens, tokenizer.special_token_texts, trial_limit_s)))
        self._lock = threading.Lock()
        self._vocabulary: tuple[LLTokenizer, MaskShape] | None = None
        self._cached: dict[bytes, Compilation] = {}  # the one asked for last comes last

    def submit(self, params: StructuredOutputsParams, tenant: str = "") -> Compilation:
        """Start to compile, or find what the same params were compiled to; what failed is tried again. The threads are
        shared fairly between tenants."""
        key = msgspec.json.encode(params)
        compilation = self._cached.pop(key, None)
        if compilation is None or (compilation.is_done and compilation.error is not None):
            compilation = Compilation(self._threads.submit(tenant, partial(self._compile, params)))
        self._cached[key] = compilation
        while len(self._cached) > MAX_CACHED_GRAMMARS or sum(map(len, self._cached)) > MAX_CACHED_BYTES:
            del self._cached[next(iter(self._cached))]
        return compilation

    def prepare(self) -> None:
        """Tell the library the vocabulary now, and not with the first grammar: that holds Python's lock, for 150,000
        tokens almost a second. A tokenizer that the library cannot take is the first grammar's to complain of."""
        with suppress(InvalidParamsError):
            self._library_vocabulary()

    @property
    def num_cached(self) -> int:
        """Grammars kept, those being compiled included."""
        return len(self._cached)

    def _compile(self, params: StructuredOutputsParams) -> GrammarState:
        """In a thread. Raises InvalidParamsError."""
        fault_point("grammar.compile")
        trial = self._trials.get()
        try:
            grammar = trial.check(params)
        finally:
            self._trials.put(trial)
        from llguidance import LLMatcher

        tokenizer, shape = self._library_vocabulary()
        state = GrammarState(LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()), shape)
        words = np.zeros(-(-self._vocab_size // 32), np.int32)
        if state.error is None:
            state.fill(words)  # what is too complex fails here; also, the first mask is the slowest
        if state.error is not None:
            raise InvalidParamsError(f"{params.structure} is not taken: {state.error}")
        if not words.any() and not state.may_end:
            raise InvalidParamsError(f"{params.structure} is not taken: no output can have this form")
        return state

    def _library_vocabulary(self) -> tuple[LLTokenizer, MaskShape]:
        """Made once. Raises InvalidParamsError for a tokenizer that the library cannot take."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                num_tokens = self._tokenizer.vocab_size
                eos = sorted(i for i in self._eos_token_ids if i < min(num_tokens, self._vocab_size))
                try:
                    tokenizer = LLTokenizer(
                        self._tokenizer.to_json(),
                        n_vocab=max(self._vocab_size, num_tokens),
                        eos_token=eos or None,
                        slices=[_WORDS, *LLTokenizer.general_slices()],
                    )
                except ValueError as error:
                    raise InvalidParamsError(f"structured_outputs: not with this tokenizer: {error}") from error
                hidden = () if eos else tuple(tokenizer.eos_tokens)  # the library wants one, and takes one
                self._vocabulary = tokenizer, MaskShape(self._vocab_size, tokenizer.vocab_size, hidden)
            return self._vocabulary

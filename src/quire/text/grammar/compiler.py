"""Grammars, compiled beside the step loop, for each request anew.

What the library has compiled grows as it is used, up to limits, and its copies share that (ADR 0020): a request would
fail because of what others have generated. So only the trial, which takes longest, is remembered, and what is compiled
only of lists of texts, which cannot come to the limits.
"""

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

from quire.common.errors import InvalidParamsError
from quire.common.faults import fault_point
from quire.common.params import StructuredOutputsParams
from quire.text.grammar.fair_threads import FairThreads
from quire.text.grammar.source import num_beginnings
from quire.text.grammar.state import GrammarState, MaskShape
from quire.text.grammar.trial import MAX_LEXER_STATES, TRIAL_LIMIT_S, TrialProcess, TrialSettings, parser_limits
from quire.text.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_VERDICTS = 256
MAX_VERDICT_BYTES = 2 * 1024**2
"""of the sources of the grammars whose trials are remembered; a list compiled takes up to forty times as much"""
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
        """Why the grammar is not taken, if it is not."""
        if self.future.cancelled():
            return "nobody waited for the grammar any more"
        error = self.future.exception()
        if isinstance(error, InvalidParamsError):
            return str(error)
        if error is None or isinstance(error, Exception):
            return None
        return f"the grammar could not be compiled: {type(error).__name__}: {error}"[:400]  # the library has panicked

    @property
    def state(self) -> GrammarState:
        """A new sequence's place in the grammar: the start. Raises what was no fault of the grammar's."""
        return self.future.result()


@dataclass(slots=True)
class _Verdict:
    """How a trial has ended."""

    grammar: str
    """in the library's words"""
    error: str | None
    """why it is not taken, if it is not"""
    num_submitted: int
    """grammars that had been asked for by then"""
    is_small: bool = False
    """what its copies share stays small for good"""
    start: GrammarState | None = None
    """of which all who ask for it get a copy, if that is so"""


class GrammarCompiler:
    """Compiles grammars for one tokenizer, in threads of its own, and remembers the trials of those asked for last.

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
        self._verdicts: dict[bytes, _Verdict] = {}  # by what was asked for; the last one comes last
        self._num_submitted = 0

    def submit(self, params: StructuredOutputsParams, tenant: str = "", *, jumps: bool = True) -> Compilation:
        """Start to compile; `jumps`: forced tokens are appended without a draw. The threads are shared fairly between
        tenants."""
        self._num_submitted += 1
        task = partial(self._compile, params, self._num_submitted, jumps)
        return Compilation(self._threads.submit(tenant, task))

    def prepare(self) -> None:
        """Tell the library the vocabulary now, and not with the first grammar: that holds Python's lock, for 150,000
        tokens almost a second. A tokenizer that the library cannot take is the first grammar's to complain of."""
        with suppress(InvalidParamsError):
            self._library_vocabulary()

    def _compile(self, params: StructuredOutputsParams, number: int, jumps: bool) -> GrammarState:
        """In a thread, what was submitted as this number. Raises InvalidParamsError."""
        fault_point("grammar.compile")
        verdict = self._verdict(params, number)
        state = self._start(params, verdict.grammar) if verdict.start is None else verdict.start.fork()
        if verdict.start is None and verdict.is_small:
            verdict.start = state.fork()
        state.jumps = jumps
        return state

    def _start(self, params: StructuredOutputsParams, grammar: str) -> GrammarState:
        from llguidance import LLMatcher

        tokenizer, shape = self._library_vocabulary()
        state = GrammarState(LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits()), shape)
        allows_any = state.error is None and bool(state.mask().any())  # the first mask is the slowest, and may fail
        if state.error is not None:
            raise InvalidParamsError(f"{params.structure} is not taken: {state.error}")
        if not allows_any and not state.may_end:
            raise InvalidParamsError(f"{params.structure} is not taken: no output can have this form")
        return state

    def _verdict(self, params: StructuredOutputsParams, number: int) -> _Verdict:
        """Of a trial that was passed, now or before. What has failed in one is tried again, unless it was asked for
        while that went on. Raises InvalidParamsError."""
        key = msgspec.json.encode(params)
        with self._lock:
            verdict = self._verdicts.get(key)
        if verdict is None or (verdict.error is not None and verdict.num_submitted < number):
            verdict = self._try_out(params)
        with self._lock:
            self._verdicts.pop(key, None)
            self._verdicts[key] = verdict
            while len(self._verdicts) > MAX_VERDICTS or sum(map(len, self._verdicts)) > MAX_VERDICT_BYTES:
                del self._verdicts[next(iter(self._verdicts))]
        if verdict.error is not None:
            raise InvalidParamsError(verdict.error)
        return verdict

    def _try_out(self, params: StructuredOutputsParams) -> _Verdict:
        trial = self._trials.get()
        try:
            grammar = trial.check(params)
            is_small = (num_beginnings(params) or MAX_LEXER_STATES) < MAX_LEXER_STATES // 2
            return _Verdict(grammar, None, self._num_submitted, is_small)
        except InvalidParamsError as error:
            return _Verdict("", str(error), self._num_submitted)
        finally:
            self._trials.put(trial)

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

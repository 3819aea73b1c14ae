"""Compiles grammars in threads beside the step loop, anew for each request.

A compiled grammar grows while it is used, up to limits, and copies of it share that growth (ADR 0020), so a request
could fail because of another's output. Therefore only the result of the trial, the slowest part, is cached; compiled
grammars are cached only for lists of texts, which cannot reach the limits.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import LifoQueue
from typing import TYPE_CHECKING, TypeAlias

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
"""Total size of the sources of cached verdicts; a compiled list of texts takes up to forty times as much memory."""
_NUM_THREADS = 2
_WORDS = "[a-z]{1,10}"
"""Tokens that the library can allow or forbid all at once, which is faster for grammars with words and names. It does
not change masks."""


Compilation: TypeAlias = Future[GrammarState]
"""The compilation of one grammar, running or finished, to the start state of a new sequence."""


def rejection(compilation: Compilation) -> str | None:
    """Why the grammar of a finished compilation was rejected; None if it was not. Then its result is the state, or an
    internal error."""
    if compilation.cancelled():
        return "the compilation was cancelled, because its request ended"
    error = compilation.exception()
    if isinstance(error, InvalidParamsError):
        return str(error)
    if error is None or isinstance(error, Exception):
        return None
    return f"the grammar could not be compiled: {type(error).__name__}: {error}"[:400]  # the library panicked


@dataclass(slots=True)
class _Verdict:
    """The result of a trial."""

    grammar: str
    """The grammar in the library's format."""
    error: str | None
    """Why the grammar was rejected; None if it was not."""
    num_submitted: int
    """Number of grammars submitted before the trial ended."""
    is_small: bool = False
    """Whether the compiled grammar cannot grow large, so that requests may share it."""
    start: GrammarState | None = None
    """Start state that is copied for each request, if the compiled grammar is shared."""


class GrammarCompiler:
    """Compiles grammars for one tokenizer in threads of its own, and caches the latest verdicts.

    The library is loaded, and the vocabulary passed to it, with the first grammar. Only one thread may call `submit`.
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
        self._verdicts: dict[bytes, _Verdict] = {}  # by params as JSON, least recently used first
        self._num_submitted = 0

    def submit(self, params: StructuredOutputsParams, tenant: str = "", *, jumps: bool = True) -> Compilation:
        """Start a compilation. The threads are shared fairly between tenants.

        With `jumps`, tokens that the grammar forces are appended without sampling.
        """
        self._num_submitted += 1
        task = partial(self._compile, params, self._num_submitted, jumps)
        return self._threads.submit(tenant, task)

    def prepare(self) -> None:
        """Pass the vocabulary to the library now, because it holds Python's lock for almost a second (150,000 tokens).

        If the library does not support the tokenizer, the first grammar reports the error.
        """
        with suppress(InvalidParamsError):
            self._library_vocabulary()

    def _compile(self, params: StructuredOutputsParams, number: int, jumps: bool) -> GrammarState:
        """Compile submission `number`, in a thread. Raises InvalidParamsError."""
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
        start = partial(LLMatcher, tokenizer, grammar, log_level=0, limits=parser_limits())
        state = GrammarState(start, shape)
        allows_any = state.error is None and bool(state.mask().any())  # the first mask is the slowest, and may fail
        if state.error is not None:
            raise InvalidParamsError(f"{params.structure} is rejected: {state.error}")
        if not allows_any and not state.may_end:
            raise InvalidParamsError(f"{params.structure} is rejected: no output can match it")
        return state

    def _verdict(self, params: StructuredOutputsParams, number: int) -> _Verdict:
        """Return the verdict of a successful trial, cached or new. Raises InvalidParamsError if the trial fails.

        A grammar that failed is tried again, unless it was submitted before that trial ended.
        """
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
        """Return the library's tokenizer, made once. Raises InvalidParamsError if it does not support the tokenizer."""
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
                    raise InvalidParamsError(f"structured_outputs: unsupported tokenizer: {error}") from error
                hidden = () if eos else tuple(tokenizer.eos_tokens)  # the library needs one, and picks a token
                self._vocabulary = tokenizer, MaskShape(self._vocab_size, tokenizer.vocab_size, hidden)
            return self._vocabulary

"""Runs the requests of one call of LLM to their end, and tokenizes texts meanwhile."""

from __future__ import annotations

import itertools
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

from msgspec.structs import replace

from quire.common.errors import PromptTooLongError, RequestError, RequestFailedError
from quire.common.log import logger
from quire.common.outputs import RequestOutput
from quire.common.params import PoolingParams
from quire.common.progress import BarChoice, PromptsBar, progress
from quire.config.machine import allowed_cpus
from quire.config.parallel import ParallelConfig
from quire.engine.adapters import AnyAdapter
from quire.engine.llm_engine import LLMEngine
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.pooling import CheckedPrompt
from quire.engine.step.interrupts import interrupt_deferred
from quire.interfaces.engine_processes import EngineProcesses
from quire.interfaces.pooling import PIECE, Pair, Tokenized, may_be_too_long, tokenized
from quire.interfaces.prompts import rejected

_EARLY_PIECE = 8
"""Texts that a thread tokenizes at a time before the first step."""
Ready = Callable[[int], int]
"""Returns how many of the prompts can be added by now, given how many requests run. If none run, it waits."""


class Run:
    """The requests of one call, one for each prompt. `add(request_id, i)` queues the request for prompt i."""

    def __init__(
        self,
        engine: LLMEngine | EngineProcesses,
        request_ids: Iterator[str],
        prompts: Sequence[Any],
        add: Callable[[str, int], None],
        *,
        alone: bool,
        ready: Ready | None = None,
        raised: tuple[type[RequestError], ...] = (),
    ) -> None:
        """With `alone`, an invalid request raises, and so do the errors `raised`; otherwise its error is in its output.
        Without `ready`, all requests are added before the first step."""
        self._engine = engine
        self._request_ids = request_ids
        self._prompts = prompts
        self._add = add
        self._alone = alone
        self._raised = raised
        self._ready = ready or (lambda num_running: len(prompts))
        self._outputs: list[RequestOutput | None] = [None] * len(prompts)
        self._places: dict[str, int] = {}
        self._num_added = 0

    def outputs(self, use_tqdm: BarChoice) -> list[RequestOutput]:
        """Run all requests, and return their outputs in the order of the prompts. If this raises, they are aborted.
        Raises RequestError while the engine sleeps, or another call runs."""
        if self._engine.is_sleeping():
            raise RequestError("the engine sleeps: call wake_up() first")
        if not self._engine.in_use.acquire(blocking=False):
            raise RequestError(
                "this LLM is in the middle of another call, of another thread or around a logits processor: use one "
                "LLM for each thread, or AsyncLLM"
            )
        try:
            return self._run(use_tqdm)
        finally:
            self._engine.in_use.release()

    def _run(self, use_tqdm: BarChoice) -> list[RequestOutput]:
        engine = self._engine
        bar = PromptsBar(len(self._prompts), engine.stats, lambda: len(engine.grammars), use_tqdm)
        try:
            while True:
                self._add_ready(bar)
                if not self._places:
                    break
                changed = engine.step()
                finished = [output for output in changed if output.request_id in self._places]
                for output in finished:
                    self._outputs[self._places.pop(output.request_id)] = output
                bar.update(len(finished))
                if not changed and not engine.has_unfinished_requests():
                    self._give_up()
        except BaseException:
            with interrupt_deferred():
                for request_id in self._places:
                    engine.abort_request(request_id)
            raise
        finally:
            bar.close()
        done = [output for output in self._outputs if output is not None]
        for i, output in enumerate(done):
            if output.error is not None:
                self._report(i, output)
        return done

    def _add_ready(self, bar: PromptsBar) -> None:
        """Add the requests that are ready; at least one, if there are more and none runs."""
        while self._num_added < len(self._prompts):
            num_ready = self._ready(len(self._places))
            for place in range(self._num_added, num_ready):
                self._add_one(place, bar)
            self._num_added = num_ready
            if self._places:
                return

    def _add_one(self, place: int, bar: PromptsBar) -> None:
        request_id = next(self._request_ids)
        try:
            with interrupt_deferred():
                self._add(request_id, place)
                self._places[request_id] = place
        except (RequestError, RequestFailedError) as error:
            if self._alone or isinstance(error, self._raised):
                raise
            self._outputs[place] = rejected(request_id, self._prompts[place], error)
            bar.update(1)

    def _give_up(self) -> None:
        """Another call of the engine has aborted the remaining requests, or taken their outputs."""
        for request_id, place in self._places.items():
            error = RequestError("the request was ended by another call of the engine")
            self._outputs[place] = rejected(request_id, self._prompts[place], error)
        self._places.clear()

    def _report(self, place: int, output: RequestOutput) -> None:
        ignored = output.outputs[0].finish_reason == "ignored"
        if self._alone and ignored:
            raise RequestError(output.error or "")
        logger.warning("prompt %d %s: %s", place, "was not run" if ignored else "was cut short", output.error)


class TokenizedFeed:
    """Tokenizes prompts in a thread of its own while the engine steps: one piece at a time, and no further ahead than
    keeps the engine busy, so that neither cores nor memory are filled with what is not needed yet."""

    def __init__(
        self, num_prompts: int, tokenize: Callable[[Sequence[int]], list[Tokenized]], max_running: int
    ) -> None:
        """`tokenize` makes the prompts at some places. No more are made ready while more than `max_running` requests
        are unfinished."""
        self._places = range(num_prompts)
        self._tokenize = tokenize
        self._max_running = max_running
        self._thread: ThreadPoolExecutor | None = None
        self._made: deque[Tokenized] = deque()
        self._num_ready = 0
        self._piece: Future[list[Tokenized]] | None = None
        if num_prompts <= PIECE:  # the first step has to wait for them all
            self._made += tokenize(self._places)
            self._num_ready = num_prompts
        else:
            self._thread = ThreadPoolExecutor(1, "tokenize-texts")
            self._begin_piece(self._thread)

    def _begin_piece(self, thread: ThreadPoolExecutor) -> None:
        piece = self._places[self._num_ready : self._num_ready + PIECE]
        self._piece = thread.submit(self._tokenize, piece) if piece else None

    def ready(self, num_running: int) -> int:
        """Return how many prompts `take` has; waits for the next ones only if no request runs."""
        while self._thread is not None and self._piece is not None:
            if num_running + len(self._made) > self._max_running:
                break
            if (num_running or self._made) and not self._piece.done():
                break
            self._made += (piece := self._piece.result())
            self._num_ready += len(piece)
            self._begin_piece(self._thread)
        return self._num_ready

    def take(self) -> Prompt:
        """Return the next prompt. Raises its error if it is wrong."""
        prompt = self._made.popleft()
        if isinstance(prompt, RequestError | RequestFailedError):
            raise prompt
        return prompt

    def close(self) -> None:
        """End the thread, if there is one; a piece that it works on is finished."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)


def request_ids() -> Iterator[str]:
    """Yield the ids of an LLM's requests."""
    return map("llm-{}".format, itertools.count())


def run_pooling(
    engine: LLMEngine | EngineProcesses,
    request_ids: Iterator[str],
    prompts: Sequence[Prompt | Pair],
    params: Sequence[PoolingParams],
    adapters: Sequence[AnyAdapter],
    *,
    alone: bool,
    use_tqdm: BarChoice,
    add_special_tokens: bool = True,
) -> list[RequestOutput]:
    """Run pooling requests, and tokenize texts meanwhile: those that may be too long before. Raises as `LLM.encode`."""
    inputs = engine.inputs.pooling
    for each, _ in itertools.groupby(params):
        inputs.check_params(each)

    def tokenize(places: Sequence[int]) -> list[Tokenized]:
        found: list[Tokenized] = []
        for each, piece in itertools.groupby(places, key=params.__getitem__):
            found += tokenized(inputs, [prompts[place] for place in piece], each, add_special_tokens)
        return found

    long = [i for i, p in enumerate(params) if p.truncate_prompt_tokens is None and may_be_too_long(inputs, prompts[i])]
    early: dict[int, Tokenized] = {}
    if long:
        with progress("tokenizing", len(long), "text") if use_tqdm else nullcontext(lambda: None) as advance:
            early = _tokenized_early(long, tokenize, _num_cores(engine.config.parallel), advance, alone=alone)

    def tokenize_others(places: Sequence[int]) -> list[Tokenized]:
        others = iter(tokenize([place for place in places if place not in early]))
        return [early.pop(place) if place in early else next(others) for place in places]

    def add(request_id: str, place: int) -> None:
        engine.add_request(request_id, feed.take(), params[place], lora_request=adapters[place])

    max_running = 2 * engine.config.scheduler.max_num_seqs
    feed = TokenizedFeed(len(prompts), tokenize_others if early else tokenize, max_running)
    try:
        run = Run(engine, request_ids, prompts, add, alone=alone, ready=feed.ready, raised=(PromptTooLongError,))
        return run.outputs(use_tqdm)
    finally:
        feed.close()


def _tokenized_early(
    places: Sequence[int],
    tokenize: Callable[[Sequence[int]], list[Tokenized]],
    num_threads: int,
    advance: Callable[[], object],
    *,
    alone: bool,
) -> dict[int, Tokenized]:
    """The prompts at places whose texts may be too long, tokenized on all cores, since nothing is computed yet. Raises
    PromptTooLongError for the first that is."""

    def make(piece: Sequence[int]) -> list[Tokenized]:
        """An array of token ids takes an eighth of a list's memory."""
        found = tokenize(piece)
        return [replace(m, token_ids=array("i", m.token_ids)) if isinstance(m, CheckedPrompt) else m for m in found]

    pieces = [places[start : start + _EARLY_PIECE] for start in range(0, len(places), _EARLY_PIECE)]
    early = dict[int, Tokenized]()
    with ExitStack() as stack:
        run: Callable[..., Iterator[list[Tokenized]]] = map
        if len(pieces) > 1 and num_threads > 1:
            pool = ThreadPoolExecutor(num_threads, "tokenize-texts")
            stack.callback(pool.shutdown, cancel_futures=True)
            run = pool.map
        for piece, prompts in zip(pieces, run(make, pieces), strict=True):
            for place, made in zip(piece, prompts, strict=True):
                if isinstance(made, PromptTooLongError):
                    raise made if alone else PromptTooLongError(f"prompt {place}: {made}")
                early[place] = made
                advance()
    return early


def _num_cores(config: ParallelConfig) -> int:
    """Cores that an engine uses, as far as the configuration and the system say."""
    return config.num_threads or len(config.cpus or allowed_cpus())

"""Ranks in threads of the test's own process, since starting processes takes seconds, and what they must equal."""

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from quire import LLM
from quire.runner import executor as executors
from quire.runner.parallel.executor import RanksExecutor
from quire.runner.parallel.pipeline.executor import PipelineExecutor
from quire.runner.parallel.pipeline.stage_process import serve as serve_stage
from quire.runner.parallel.rank_process import serve


class ThreadRank:
    """A rank in a thread: the same messages, kernels and shared memory."""

    def __init__(self, sock: socket.socket, memory: int) -> None:
        self._socket, self._memory = sock.dup(), os.dup(memory)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        try:
            with suppress(BrokenPipeError, ConnectionResetError):
                serve(self._socket, self._memory, pins=False)
        finally:
            os.close(self._memory)
            self._socket.close()

    def end(self, patience_s: float = 10.0) -> str:
        self._thread.join(patience_s)
        return "was ended" if not self._thread.is_alive() else "goes on"


class ThreadStage(ThreadRank):
    """A stage in a thread: the same messages and kernels."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock.dup()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._socket, suppress(BrokenPipeError, ConnectionResetError):
            serve_stage(self._socket, pins=False)


@contextmanager
def in_threads() -> Iterator[None]:
    """Engines of several ranks or stages have them in threads."""
    before = dict(executors.EXECUTORS)
    executors.EXECUTORS["ranks"] = partial(RanksExecutor, launch=ThreadRank)
    executors.EXECUTORS["pipeline"] = partial(PipelineExecutor, executors.make_stage, launch=ThreadStage)
    try:
        yield
    finally:
        executors.EXECUTORS.update(before)


def answers(llm: LLM, prompts: Sequence[Any], params: Sequence[Any]) -> list[Any]:
    """All that callers see of the answers to requests that run side by side, but for times and hits."""
    engine, done = llm.engine, {}
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, its_params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = (output.outputs, output.prompt_logprobs, output.error)
    return [done[i] for i in range(len(prompts))]


def of_ranks(num_ranks: int, prompts: Sequence[Any], params: Sequence[Any], **given: Any) -> list[Any]:
    """The answers of an engine of this many ranks, each of one thread; with stages, this many in each."""
    with in_threads():
        llm = LLM(tensor_parallel_size=num_ranks, num_threads=1, **given)
        try:
            return answers(llm, prompts, params)
        finally:
            llm.engine.executor.close()

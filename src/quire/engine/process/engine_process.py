"""The engine process: an LLMEngine between two ends of a socket.

Started as `python -m quire.engine.process.engine_process DESCRIPTOR`.

It serves one client, whose socket it inherits, and ends when that is closed. The main thread steps; another one reads.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeAlias

import msgspec

from quire.common import liveness
from quire.common.batch import TokenLogprobs
from quire.common.errors import QuireError, RequestFailedError
from quire.common.faults import fault_point, fault_write
from quire.common.log import logger, set_up_logging
from quire.common.memory import IDLE_S, give_back_memory
from quire.common.outputs import CompletionOutput, EngineStats, FinishReason
from quire.common.params import BeamSearchParams, SamplingParams
from quire.config.args import EngineArgs
from quire.engine.process.heartbeat import Pulse, beat
from quire.engine.process.messages import (
    Abort,
    AddRequest,
    AddScoring,
    CacheFrame,
    ProtocolError,
    Ready,
    RequestDelta,
    Rows,
    SequenceDelta,
    SetCacheView,
    Start,
    StartFailed,
    StepDone,
    ToEngine,
    read_frame,
    to_frame,
)
from quire.engine.requests.output import SampleOutput
from quire.engine.requests.sequence import SequenceGroup
from quire.engine.view.cache_view import MIN_INTERVAL_S, CacheView

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

_EXIT_GRACE_S = 0.5
"""left to the step that runs when the client goes"""

_MESSAGES_S = 0.01
"""to take messages in before a step; one that comes with a thousand bad words takes as long"""

_FAILED = RequestFailedError.__name__

Inbox: TypeAlias = "SimpleQueue[ToEngine | None]"
"""messages as they come; None is the end"""


class CacheFrames(Protocol):
    """The cache view of one engine."""

    def frame(self, now: float) -> bytes | None:
        """What the watchers are told next, `now` in seconds of time.monotonic(); None: nothing, for the time being."""
        ...

    def restart(self) -> None:
        """The next frame is a whole one."""
        ...

    def close(self) -> None:
        """Nobody watches any more."""
        ...


class EngineProcess:
    """The main loop around an engine: take messages, step, tell what has changed, in one frame."""

    def __init__(
        self,
        engine: LLMEngine,
        inbox: Inbox,
        send: Callable[[bytes], object],
        make_cache_view: Callable[[LLMEngine], CacheFrames] = CacheView,
        pulse: Pulse | None = None,
    ) -> None:
        """`pulse` is kept up to date."""
        self.engine = engine
        self._pulse = pulse or Pulse()
        self._inbox = inbox
        self._send = send
        self._make_cache_view = make_cache_view
        self._cache_view: CacheFrames | None = None
        self._keys: dict[str, int] = {}
        self._told: EngineStats | None = None

    def run(self) -> None:
        """Until the client has gone. A request that fails in a step ends alone."""
        self._send(to_frame(Ready(self.engine.model_config.max_model_len, self.engine.stats())))
        while True:
            deltas = []
            self._pulse.num_turns += 1
            for message in self._messages():
                if message is None:
                    return
                deltas += self._handle(message)
            if self.engine.has_unfinished_requests():
                deltas += self._step()
            self._tell(deltas)

    def _messages(self) -> Iterator[ToEngine | None]:
        """All that wait, or as many as do not keep the requests that run waiting; the next one, however long it takes,
        while there is nothing to step. Watchers of the cache are told of the last step even so."""
        end_s = time.monotonic() + _MESSAGES_S
        try:
            self._pulse.is_busy = self.engine.has_unfinished_requests()
            if not self._pulse.is_busy:
                message = self._next_message()
                self._pulse.is_busy = True
                yield message
            while True:
                yield self._inbox.get_nowait()
                if self.engine.has_unfinished_requests() and time.monotonic() > end_s:
                    return
        except Empty:
            return

    def _next_message(self) -> ToEngine | None:
        """However long it takes, but that memory is given back after a moment. Raises Empty where watchers of the cache
        wait to be told of the last step."""
        if self._cache_view is not None:
            return self._inbox.get(timeout=MIN_INTERVAL_S)
        try:
            return self._inbox.get(timeout=IDLE_S)
        except Empty:
            give_back_memory()
            return self._inbox.get()

    def _handle(self, message: ToEngine) -> list[RequestDelta]:
        match message:
            case AddRequest() | AddScoring():
                return self._add(message)
            case Abort():
                self._keys.pop(message.request_id, None)
                self.engine.abort_request(message.request_id)
            case SetCacheView():
                self._watch(message.on)
        return []

    def _watch(self, on: bool) -> None:
        if self._cache_view is None:
            self._cache_view = self._make_cache_view(self.engine) if on else None
        elif on:
            self._cache_view.restart()
        else:
            self._cache_view.close()
            self._cache_view = None

    def _add(self, message: AddRequest | AddScoring) -> list[RequestDelta]:
        """Queue a request; if the engine refuses it after all, that is its end."""
        try:
            fault_point("engine.take", message.request_id)
            if isinstance(message, AddRequest):
                prompt = {"prompt_token_ids": message.token_ids, "cache_salt": message.cache_salt}
                kind: type[BeamSearchParams | SamplingParams]
                kind = BeamSearchParams if message.is_beam_search else SamplingParams
                params = msgspec.msgpack.decode(message.params, type=kind)
                self.engine.add_request(
                    message.request_id, prompt, params, arrival_time=message.arrival_time, progress=message.progress
                )
            else:
                context = {
                    "prompt_token_ids": message.token_ids[: message.first],
                    "cache_salt": message.cache_salt,
                }
                self.engine.add_scoring_request(message.request_id, context, message.token_ids[message.first :])
        except Exception as error:
            logger.exception("request %s was refused by the engine", message.request_id)
            ignored = SequenceDelta(0, [], "ignored")
            return [RequestDelta(message.key, [ignored], True, error=str(error), error_kind=type(error).__name__)]
        self._keys[message.request_id] = message.key
        return []

    def _step(self) -> list[RequestDelta]:
        """Raises EngineBrokenError, which ends the process: nothing but a new one helps."""
        deltas = []
        for group in self.engine.advance():
            key = self._keys.pop(group.request_id) if group.is_finished else self._keys[group.request_id]
            try:
                fault_point("output.make", group.request_id)
                if group.search is None or group.is_finished:
                    deltas.append(to_delta(key, group))
            except Exception as error:
                self._keys.pop(group.request_id, None)
                self.engine.fail_request(group, "when its output was made", error)
                deltas.append(RequestDelta(key, [], True, error=group.error, error_kind=_FAILED))
        return deltas

    def _tell(self, deltas: list[RequestDelta]) -> None:
        """One frame for the step, if anything has changed; and one for those who watch the cache."""
        stats = self.engine.stats()
        if deltas or stats != self._told:
            self._told = stats
            for frame in self._frames(deltas, stats):
                self._send(frame)
        if self._cache_view is not None and (payload := self._cache_view.frame(time.monotonic())) is not None:
            self._send(to_frame(CacheFrame(payload)))

    def _frames(self, deltas: list[RequestDelta], stats: EngineStats) -> Iterator[bytes]:
        """One frame; where that is too large, one for each request. What is too large even so ends its request."""
        try:
            yield to_frame(StepDone(deltas, stats))
            return
        except ProtocolError as error:
            reason = f"the log-probabilities are too many to be sent: {error}; ask for fewer"
        for delta in deltas:
            try:
                frame = to_frame(StepDone([delta], stats))
            except ProtocolError:
                for request_id in [request_id for request_id, key in self._keys.items() if key == delta.key]:
                    self._handle(Abort(request_id))
                end = RequestDelta(delta.key, [SequenceDelta(0, [], "abort")], True, error=reason)
                frame = to_frame(StepDone([end], stats))
            yield frame


def to_delta(key: int, group: SequenceGroup) -> RequestDelta:
    """What is new of a request since the last delta. A beam search has one delta, at its end, with its outputs."""
    if group.search is not None:
        sequences = [
            SequenceDelta(beam.index, beam.token_ids, *_reasons(beam), cumulative_logprob=beam.cumulative_logprob)
            for beam in group.search.outputs(group.seqs)
        ]
    else:
        sequences = [_sequence_delta(seq.output) for seq in group.seqs if not seq.output.has_emitted_end]
    scores = group.outputs.scores
    return RequestDelta(
        key,
        sequences,
        group.is_finished,
        group.num_cached_tokens,
        group.metrics,
        None if scores is None else _packed(scores.rows.take()),
        group.error,
        _FAILED if group.has_failed else None,
    )


def _sequence_delta(sample: SampleOutput) -> SequenceDelta:
    start, _ = sample.num_emitted
    sample.num_emitted, sample.has_emitted_end = (len(sample.token_ids), 0), sample.finish_reason is not None
    rows = None if sample.logprobs is None else _packed(sample.logprobs.take())
    return SequenceDelta(sample.index, sample.token_ids[start:], *_reasons(sample), rows)


def _reasons(output: SampleOutput | CompletionOutput) -> tuple[FinishReason | None, int | None]:
    """Return why it ended. Stop strings are found in the API process, where text is made."""
    return output.finish_reason, output.stop_reason if isinstance(output.stop_reason, int) else None


def _packed(logprobs: TokenLogprobs | None) -> Rows | None:
    return None if logprobs is None else Rows.pack(logprobs)


def read_messages(stream: BinaryIO, inbox: Inbox) -> None:
    """Fill the inbox until the client has gone or sends nonsense."""
    decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
    try:
        while (frame := read_frame(stream)) is not None:
            message = decoder.decode(frame)
            fault_point("engine.receive", type(message).__name__)
            inbox.put(message)
    except Exception:
        logger.exception("the engine's client cannot be read, or sent what it must not")
    inbox.put(None)


def _read_to_the_end(stream: BinaryIO, inbox: Inbox) -> None:
    """As read_messages; then the process ends, with its step if that is soon over, for nobody wants the outcome."""
    read_messages(stream, inbox)
    time.sleep(_EXIT_GRACE_S)
    os._exit(0)


def _beat_to_the_end(send: Callable[[bytes], None], pulse: Pulse) -> None:
    """As beat; then the process ends: what was sent may be a part of a frame, and the rest would be nonsense."""
    try:
        beat(send, pulse)
    except Exception:
        logger.exception("the engine's client cannot be written to")
        os._exit(1)


def main(descriptor: int) -> None:
    """Serve the client whose socket this is. The first message says what engine to make."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the client, which may want to finish its requests
        signal.signal(number, signal.SIG_IGN)
    liveness.end_with_parent()
    client = socket.socket(fileno=descriptor)
    client.set_inheritable(False)
    inbox: Inbox = SimpleQueue()
    threading.Thread(target=_read_to_the_end, args=(client.makefile("rb"), inbox), daemon=True).start()
    lock = threading.Lock()

    def send(frame: bytes) -> None:
        try:
            with lock:
                fault_write("engine.send", client.sendall, frame)
        except (BrokenPipeError, ConnectionResetError):
            sys.exit()

    pulse = Pulse()
    threading.Thread(target=_beat_to_the_end, args=(send, pulse), daemon=True).start()
    start = inbox.get()
    if not isinstance(start, Start):
        return
    if start.log_format is not None:
        set_up_logging(start.log_format)
    from quire.engine.llm_engine import LLMEngine  # with torch, which takes seconds: heartbeats come first

    try:
        engine = LLMEngine.from_args(EngineArgs.from_kwargs(**start.args))
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("the engine could not be made")
        send(to_frame(StartFailed(type(error).__name__, str(error))))
        return
    engine.grammars.prepare()
    gc.collect()
    gc.freeze()  # what is there stays: to look through it again and again would hold up a step for a tenth of a second
    EngineProcess(engine, inbox, send, pulse=pulse).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))

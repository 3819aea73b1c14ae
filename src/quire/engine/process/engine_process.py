"""The engine process: an LLMEngine that serves one client over a socket.

Started as `python -m quire.engine.process.engine_process DESCRIPTOR`.

The process inherits the client's socket and ends when the socket is closed. The main thread runs the engine's steps;
another thread reads messages, and a third one sends heartbeats.
"""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

import msgspec

from quire.common import liveness
from quire.common.errors import QuireError, RequestFailedError
from quire.common.faults import fault_point, fault_write
from quire.common.log import logger, set_up_logging
from quire.common.memory import IDLE_S, collection_paused, give_back_memory
from quire.common.outputs import CompletionOutput, EngineStats, FinishReason
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams
from quire.common.progress import log_progress
from quire.config.args import EngineArgs
from quire.engine.process import messages
from quire.engine.process.heartbeat import Pulse, beat
from quire.engine.requests.output import SampleOutput, places_from
from quire.engine.requests.sequence import SequenceGroup
from quire.engine.view.block_tokens import block_tokens
from quire.engine.view.cache_view import MIN_INTERVAL_S, CacheView
from quire.kv.prefix_cache.changes import PrefixChanges
from quire.runner.parallel.machines.node import run_node

if TYPE_CHECKING:
    from quire.engine.llm_engine import LLMEngine

_EXIT_GRACE_S = 0.5
"""Time in which the running step may finish after the client has closed its socket."""

_MESSAGES_S = 0.01
"""Time for processing messages before a step. A single request with a thousand bad words takes this long."""

POOLING_NICENESS = 10
"""How much lower the priority of an engine that pools is. Beside an engine that generates on the same cores, a tenth of
the time is left to it: each token of a stream is waited for, of a text only the end."""

_FAILED = RequestFailedError.__name__

Inbox: TypeAlias = "SimpleQueue[messages.ToEngine | None]"
"""Messages in the order in which they arrive. None means that there will be no more."""


class EngineProcess:
    """The main loop around an engine: process messages, run a step, and send what has changed in one frame."""

    def __init__(
        self,
        engine: LLMEngine,
        inbox: Inbox,
        send: Callable[[bytes], object],
        make_cache_view: Callable[[LLMEngine], CacheView] = CacheView,
        pulse: Pulse | None = None,
    ) -> None:
        """`pulse` is updated in each turn of the loop, for the thread that sends heartbeats."""
        self.engine = engine
        self._pulse = pulse or Pulse()
        self._inbox = inbox
        self._send = send
        self._make_cache_view = make_cache_view
        self._cache_view: CacheView | None = None
        self._inspector = ThreadPoolExecutor(1, "inspect-adapters")  # starts its thread with the first adapter
        self._prefixes: PrefixChanges | None = None
        self._keys: dict[str, int] = {}
        self._last_stats: EngineStats | None = None

    def run(self) -> None:
        """Serve until the client closes its socket. A request that fails in a step ends alone."""
        engine = self.engine
        num_bytes = engine.plan.total_bytes
        ready = messages.Ready(engine.model_config.max_model_len, engine.stats(), num_bytes, engine.pooler)
        self._send(messages.to_frame(ready))
        while True:
            deltas = []
            self._pulse.num_turns += 1
            for message in self._messages():
                if message is None:
                    return
                deltas += self._handle(message)
            if self.engine.has_unfinished_requests():
                deltas += self._step()
            self._send_changes(deltas)

    def _messages(self) -> Iterator[messages.ToEngine | None]:
        """Yield the messages that have arrived. If there is nothing to step, wait for the first one.

        While requests run, this stops after _MESSAGES_S, so that they do not wait. While the cache is watched, it stops
        waiting after MIN_INTERVAL_S, so that the changes of the last step are sent.
        """
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

    def _next_message(self) -> messages.ToEngine | None:
        """Wait for the next message; after IDLE_S, return free memory to the system first. While the cache is watched,
        raises Empty after MIN_INTERVAL_S."""
        if self._cache_view is not None:
            return self._inbox.get(timeout=MIN_INTERVAL_S)
        try:
            return self._inbox.get(timeout=IDLE_S)
        except Empty:
            give_back_memory()
            return self._inbox.get()

    def _handle(self, message: messages.ToEngine) -> list[messages.RequestDelta]:
        match message:
            case messages.AddRequest() | messages.AddScoring() | messages.AddPooling():
                return self._add(message)
            case messages.AddMany():
                return [delta for each in message.requests for delta in self._add(each)]
            case messages.Abort():
                for request_id in message.request_ids:
                    self._keys.pop(request_id, None)
                    self.engine.abort_request(request_id)
            case messages.InspectAdapter():
                self._inspector.submit(self._inspect, message)
            case messages.KeepAdapters():
                self.engine.scheduler.adapters.keep_only(message.digests, message.pinned)
            case messages.SetCacheView():
                self._watch(message.on)
            case messages.ReadBlocks():
                tokens = block_tokens(self.engine, message.tier, message.block_ids)
                self._send(messages.to_frame(messages.CacheFrame(msgspec.msgpack.encode(tokens), message.number)))
            case messages.ShareHashes():
                self._prefixes = self.engine.blocks.share_hashes(message.key)
            case messages.Control():
                self._send(messages.to_frame(self._control(message.action)))
        return []

    def _inspect(self, message: messages.InspectAdapter) -> None:
        """Read an adapter's files, in a thread in which nothing else is done, and send what they contain."""
        try:
            answer = messages.AdapterInspected(message.number, self.engine.adapters.inspect(message.request))
        except Exception as error:
            if not isinstance(error, QuireError):
                logger.exception("the adapter %s could not be read", message.request.lora_name)
            answer = messages.AdapterInspected(message.number, None, type(error).__name__, str(error))
        self._send(messages.to_frame(answer))

    def _control(self, action: messages.Action) -> messages.ControlDone:
        """Call the method. An error while the model is loaded again is an answer too: the engine then still sleeps."""
        try:
            return messages.ControlDone(getattr(self.engine, action)() is not False)
        except Exception as error:
            logger.error("%s failed: %s", action, error)
            return messages.ControlDone(False, type(error).__name__, str(error))

    def _watch(self, on: bool) -> None:
        if self._cache_view is None:
            self._cache_view = self._make_cache_view(self.engine) if on else None
        elif on:
            self._cache_view.restart()
        else:
            self._cache_view.close()
            self._cache_view = None

    def _add(self, message: messages.AddAny) -> list[messages.RequestDelta]:
        """Queue a request. If the engine rejects it, the returned delta ends it."""
        try:
            fault_point("engine.take", message.request_id)
            self._queue(message)
        except Exception as error:
            logger.exception("request %s was refused by the engine", message.request_id)
            ignored = messages.SequenceDelta(0, [], "ignored")
            return [
                messages.RequestDelta(message.key, [ignored], True, error=str(error), error_kind=type(error).__name__)
            ]
        self._keys[message.request_id] = message.key
        return []

    def _queue(self, message: messages.AddAny) -> None:
        prompt: dict[str, object] = {"prompt_token_ids": message.token_ids, "cache_salt": message.cache_salt}
        params: SamplingParams | BeamSearchParams | PoolingParams
        match message:
            case messages.AddScoring(first=first):
                context = {"prompt_token_ids": message.token_ids[:first], "cache_salt": message.cache_salt}
                continuation = message.token_ids[first:]
                self.engine.add_scoring_request(message.request_id, context, continuation, lora_request=message.adapter)
                return
            case messages.AddPooling(params=params, token_type_ids=types):
                prompt, progress = prompt if types is None else {**prompt, "token_type_ids": types}, None
            case messages.AddRequest(progress=progress):
                kind: type[BeamSearchParams | SamplingParams]
                kind = BeamSearchParams if message.is_beam_search else SamplingParams
                params = msgspec.msgpack.decode(message.params, type=kind)
        self.engine.add_request(
            message.request_id,
            prompt,
            params,
            arrival_time=message.arrival_time,
            progress=progress,
            lora_request=message.adapter,
        )

    def _step(self) -> list[messages.RequestDelta]:
        """Run a step. Raises EngineBrokenError, which ends the process: only a new engine can continue."""
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
                deltas.append(messages.RequestDelta(key, [], True, error=group.error, error_kind=_FAILED))
        return deltas

    def _send_changes(self, deltas: list[messages.RequestDelta]) -> None:
        """Send a frame for the step if anything has changed, and one for the watchers of the cache."""
        found, gone = self._prefixes.take() if self._prefixes is not None else ([], [])
        if found or gone:
            self._send(messages.to_frame(messages.PrefixReport(found, gone)))
        stats = self.engine.stats()
        if deltas or stats != self._last_stats:
            self._last_stats = stats
            for frame in self._frames(deltas, stats):
                self._send(frame)
        if self._cache_view is not None and (payload := self._cache_view.frame(time.monotonic())) is not None:
            self._send(messages.to_frame(messages.CacheFrame(payload)))

    def _frames(self, deltas: list[messages.RequestDelta], stats: EngineStats) -> Iterator[bytes]:
        """Yield one frame with all deltas or, if that would be too large, one for each request. A request whose delta
        alone is too large is aborted."""
        try:
            yield messages.to_frame(messages.StepDone(deltas, stats))
            return
        except messages.ProtocolError as error:
            reason = f"the log-probabilities or vectors are too many to be sent: {error}; ask for fewer"
        for delta in deltas:
            try:
                frame = messages.to_frame(messages.StepDone([delta], stats))
            except messages.ProtocolError:
                request_ids = [request_id for request_id, key in self._keys.items() if key == delta.key]
                self._handle(messages.Abort(request_ids))
                end = messages.RequestDelta(delta.key, [messages.SequenceDelta(0, [], "abort")], True, error=reason)
                frame = messages.to_frame(messages.StepDone([end], stats))
            yield frame


def to_delta(key: int, group: SequenceGroup) -> messages.RequestDelta:
    """Return what a request has added since its last delta. A beam search has a single delta, with its outputs."""
    if group.search is not None:
        sequences = [
            messages.SequenceDelta(
                beam.index, beam.token_ids, *_reasons(beam), cumulative_logprob=beam.cumulative_logprob
            )
            for beam in group.search.outputs(group.seqs)
        ]
    else:
        sequences = [_sequence_delta(seq.output) for seq in group.seqs if not seq.output.has_emitted_end]
    scores = group.outputs.scores
    return messages.RequestDelta(
        key,
        sequences,
        group.is_finished,
        group.num_cached_tokens,
        group.metrics,
        None if scores is None else messages.Rows.pack(scores.rows.take()),
        group.error,
        _FAILED if group.has_failed else None,
        None if group.outputs.pooling is None else messages.Vectors.pack(group.outputs.pooling.result),
    )


def _sequence_delta(sample: SampleOutput) -> messages.SequenceDelta:
    start, _ = sample.num_emitted
    sample.num_emitted, sample.has_emitted_end = (len(sample.token_ids), 0), sample.finish_reason is not None
    rows = None if sample.logprobs is None else messages.Rows.pack(sample.logprobs.take())
    drafts = [places_from(places, start) for places in (sample.accepted_drafts, sample.predicted_drafts)]
    return messages.SequenceDelta(sample.index, sample.token_ids[start:], *_reasons(sample), rows, None, *drafts)


def _reasons(output: SampleOutput | CompletionOutput) -> tuple[FinishReason | None, int | None]:
    """Return why the output ended. Stop strings are not among the reasons: the API process, which makes text, finds
    them."""
    return output.finish_reason, output.stop_reason if isinstance(output.stop_reason, int) else None


def read_messages(stream: BinaryIO, inbox: Inbox) -> None:
    """Put messages into the inbox until the socket is closed or a message is malformed."""
    decoder: msgspec.msgpack.Decoder[messages.ToEngine] = msgspec.msgpack.Decoder(messages.ToEngine)
    try:
        while (frame := messages.read_frame(stream)) is not None:
            message = decoder.decode(frame)
            fault_point("engine.receive", type(message).__name__)
            inbox.put(message)
    except ConnectionResetError:  # a client that has ended may have left messages unread
        pass
    except Exception:
        logger.exception("the engine's client cannot be read, or sent what it must not")
    inbox.put(None)


def _read_to_the_end(stream: BinaryIO, inbox: Inbox) -> None:
    """Read messages to their end, and then end the process. The running step gets _EXIT_GRACE_S to finish."""
    read_messages(stream, inbox)
    time.sleep(_EXIT_GRACE_S)
    os._exit(0)


def _beat_to_the_end(send: Callable[[bytes], None], pulse: Pulse) -> None:
    """Send heartbeats. End the process if that fails, since nothing can be read after a part of a frame."""
    try:
        beat(send, pulse)
    except Exception:
        logger.exception("the engine's client cannot be written to")
        os._exit(1)


def _lower_priority() -> None:
    """Lower this thread's priority, and that of the session: Linux may divide the time among sessions first."""
    os.nice(POOLING_NICENESS)
    with suppress(OSError), Path("/proc/self/autogroup").open("w") as file:  # Linux only, and can be switched off
        file.write(str(POOLING_NICENESS))


def main(descriptor: int) -> None:
    """Serve the client whose socket has this file descriptor. Its first message has the engine's arguments."""
    liveness.follow_parent()
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
    if not isinstance(start, messages.Start):
        return
    liveness.hang_timeout_s = start.hang_timeout_s
    log_progress()
    if start.log_format is not None:
        set_up_logging(start.log_format)
    try:
        with collection_paused():
            # It imports torch, which takes a second: heartbeats start before.
            from quire.engine.llm_engine import LLMEngine
        args = EngineArgs(**start.args)
        if start.is_other_machine:
            run_node(args)  # until the client closes its socket: an engine that sleeps wakes up again
        if args.resolve().model.runner == "pooling":
            _lower_priority()  # before the threads of the kernels start
        engine = LLMEngine.from_args(args)
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("the engine could not be made")
        send(messages.to_frame(messages.StartFailed(type(error).__name__, str(error))))
        return
    engine.grammars.compiler.prepare()
    gc.collect()
    gc.freeze()  # these objects live as long as the engine; examining them would delay a step by a tenth of a second
    liveness.on_loss = lambda: inbox.put(None)  # a rank has ended while there may be nothing to do
    EngineProcess(engine, inbox, send, pulse=pulse).run()


if __name__ == "__main__":
    main(int(sys.argv[1]))

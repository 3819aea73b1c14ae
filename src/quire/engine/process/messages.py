"""What the API process and the engine process tell each other: msgpack of tagged structs, each in a frame.

A frame is its length, 4 bytes little-endian, and so many bytes. The length is checked before anything is allocated.
Tokens travel, texts do not: text is made, and stop strings are found, in the API process.
"""

from __future__ import annotations

from typing import Any, BinaryIO

import msgspec
import numpy as np

from quire.common.batch import TokenLogprobs
from quire.common.outputs import EngineStats, FinishReason, RequestMetrics

MAX_FRAME_BYTES = 256 * 1024**2
LENGTH_BYTES = 4


class ProtocolError(ConnectionError):
    """The other process sent what it must not."""


class Start(msgspec.Struct, tag=True):
    """The first message: what engine to make."""

    args: dict[str, Any]
    """the fields of EngineArgs"""
    log_format: str | None = None
    """see `set_up_logging`"""


class Progress(msgspec.Struct):
    """How far a request came in an engine that has died, for another engine to continue it."""

    metrics: RequestMetrics
    num_cached_tokens: int
    token_ids: list[int] = []
    """The output tokens of a single sample. Empty for several samples, which begin again."""


class AddRequest(msgspec.Struct, tag=True, omit_defaults=True):
    """Queue a request, which was found right."""

    key: int
    """names it in what comes back; never used twice"""
    request_id: str
    token_ids: list[int]
    cache_salt: str
    arrival_time: float
    """seconds of time.monotonic(), a clock that all processes of a machine share"""
    is_beam_search: bool
    params: msgspec.Raw
    """SamplingParams or BeamSearchParams; decoded where an error is this request's alone"""
    progress: Progress | None = None
    """How far it came in an engine before this one."""


class AddScoring(msgspec.Struct, tag=True):
    """Queue a request to score its tokens from `first` on."""

    key: int
    request_id: str
    token_ids: list[int]
    first: int
    cache_salt: str


class Abort(msgspec.Struct, tag=True):
    """End a request, if it still runs; nothing comes back."""

    request_id: str


class SetCacheView(msgspec.Struct, tag=True):
    """Begin the cache view anew, its next frame being a whole one, or end it."""

    on: bool


ToEngine = Start | AddRequest | AddScoring | Abort | SetCacheView


class Rows(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of some tokens: the arrays of TokenLogprobs, little-endian."""

    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    @classmethod
    def pack(cls, logprobs: TokenLogprobs) -> Rows:
        """The arrays as bytes."""
        return cls(
            logprobs.token_ids.astype("<i4").tobytes(),
            logprobs.logprobs.astype("<f4").tobytes(),
            logprobs.ranks.astype("<i4").tobytes(),
        )

    def unpack(self) -> TokenLogprobs:
        """The bytes as arrays."""
        ranks = np.frombuffer(self.ranks, "<i4")
        shape = len(ranks), -1
        token_ids, logprobs = np.frombuffer(self.token_ids, "<i4"), np.frombuffer(self.logprobs, "<f4")
        return TokenLogprobs(token_ids.reshape(shape), logprobs.reshape(shape), ranks)


class SequenceDelta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is new of one sequence; of a beam search's output, all."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: Rows | None = None
    cumulative_logprob: float | None = None
    """of a beam search's output"""


class RequestDelta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What is new of one request."""

    key: int
    sequences: list[SequenceDelta]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: Rows | None = None
    """of the prompt's tokens that were scored since the last time"""
    error: str | None = None
    error_kind: str | None = None
    """name of the exception with which the engine refused the request; None if it took it"""


class Ready(msgspec.Struct, tag=True):
    """The engine waits for requests."""

    max_model_len: int
    stats: EngineStats


class Heartbeat(msgspec.Struct, tag=True):
    """Sent once a second from the process's first moments on."""

    progress: int
    """something else than the last time if the step has got on meanwhile"""
    is_busy: bool
    """it ought to get on"""


class StartFailed(msgspec.Struct, tag=True):
    """There will be no engine."""

    kind: str
    """name of the exception"""
    message: str


class StepDone(msgspec.Struct, tag=True):
    """What a step changed, or messages did while there was nothing to step."""

    deltas: list[RequestDelta]
    stats: EngineStats


class CacheFrame(msgspec.Struct, tag=True):
    """The next frame of the cache view."""

    payload: bytes


ToClient = Ready | StartFailed | Heartbeat | StepDone | CacheFrame

_encoder = msgspec.msgpack.Encoder()


def to_frame(message: ToEngine | ToClient) -> bytes:
    """A message as it travels. Raises ProtocolError for one that is too large; what msgspec raises for what cannot be
    written, such as an integer of more than 64 bits."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    num_bytes = len(frame) - LENGTH_BYTES
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {num_bytes:,} bytes: at most {MAX_FRAME_BYTES:,} are allowed")
    frame[:LENGTH_BYTES] = num_bytes.to_bytes(LENGTH_BYTES, "little")
    return bytes(frame)


def frame_len(head: bytes) -> int:
    """The number of bytes that follow these four. Raises ProtocolError if there are too many."""
    num_bytes = int.from_bytes(head, "little")
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {num_bytes:,} bytes: at most {MAX_FRAME_BYTES:,} are allowed")
    return num_bytes


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's content; None at the end, also where it comes in the middle of a frame."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    num_bytes = frame_len(head)
    body = stream.read(num_bytes)
    return body if len(body) == num_bytes else None

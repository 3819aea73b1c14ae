"""The messages between the API process and the engine process: tagged structs in msgpack, each in a frame.

A frame is the length of its content (4 bytes, little-endian), then the content. The length is checked before memory is
allocated. Messages contain tokens and never text, because the API process makes text and finds stop strings.
"""

from __future__ import annotations

from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np

from quire.common.batch import Pooled, TokenLogprobs
from quire.common.lora import KnownAdapter, LoRARequest
from quire.common.outputs import EngineStats, FinishReason, RequestMetrics
from quire.common.params import PoolerInfo, PoolingParams

MAX_FRAME_BYTES = 256 * 1024**2
LENGTH_BYTES = 4


class ProtocolError(ConnectionError):
    """The other process sent something that violates the protocol."""


class Start(msgspec.Struct, tag=True):
    """The first message: the arguments with which to make the engine."""

    args: dict[str, Any]
    """The fields of EngineArgs."""
    log_format: str | None = None
    """Format of the log, as in `set_up_logging`; None to leave logging as it is."""
    hang_timeout_s: float | None = None
    """After how long without progress the process is ended; None for never."""
    is_other_machine: bool = False
    """Whether the process computes for that of machine 0 of its engine, which it joins, and serves nothing itself."""


class Progress(msgspec.Struct):
    """The progress of a request in an engine that has died, from which another engine continues it."""

    metrics: RequestMetrics
    num_cached_tokens: int
    token_ids: list[int] = []
    """The output tokens of a single sample. Empty for several samples, which start again from the prompt."""


class _Add(msgspec.Struct):
    """What all messages that queue a request have."""

    key: int
    """Identifies the request in messages from the engine; never used twice."""
    request_id: str
    token_ids: list[int]
    cache_salt: str


class AddRequest(_Add, tag=True, omit_defaults=True):
    """Queue a request, which the API process has checked."""

    arrival_time: float
    """Seconds of time.monotonic(), a clock that all processes of a machine share."""
    is_beam_search: bool
    params: msgspec.Raw
    """SamplingParams or BeamSearchParams, encoded on their own, so that an error in them ends only this request."""
    progress: Progress | None = None
    """Progress in an earlier engine that died; None for a new request."""
    adapter: KnownAdapter | None = None
    """The LoRA adapter as it was when the request was made, so that every engine uses the same content or none."""


class AddScoring(_Add, tag=True):
    """Queue a request that scores its tokens from index `first` on."""

    first: int
    adapter: KnownAdapter | None = None


class AddPooling(_Add, tag=True, omit_defaults=True):
    """Queue a request whose hidden states are pooled."""

    arrival_time: float
    params: PoolingParams
    token_type_ids: tuple[int, ...] | None = None
    adapter: KnownAdapter | None = None


AddAny = AddRequest | AddScoring | AddPooling


class AddMany(msgspec.Struct, tag=True):
    """Queue the pooling requests of one caller."""

    requests: list[AddPooling]


class InspectAdapter(msgspec.Struct, tag=True):
    """Read the files of a LoRA adapter, without loading it. The answer is an AdapterInspected with this number."""

    number: int
    request: LoRARequest


class KeepAdapters(msgspec.Struct, tag=True):
    """The digests of the LoRA adapters that stay loaded while no request uses them. Others are unloaded with the last
    request that uses them. The pinned ones are unloaded last."""

    digests: frozenset[str]
    pinned: frozenset[str]


class Abort(msgspec.Struct, tag=True):
    """Abort these requests, as far as they still run. The engine sends no answer."""

    request_ids: list[str]


class SetCacheView(msgspec.Struct, tag=True):
    """Start or stop the cache view. If it runs already, its next frame is a whole snapshot again."""

    on: bool


class ReadBlocks(msgspec.Struct, tag=True):
    """Ask for the tokens in blocks of a tier. The answer is a CacheFrame with this number."""

    number: int
    tier: int
    block_ids: list[int]


class ShareHashes(msgspec.Struct, tag=True):
    """Hash blocks with this key, and report which prefixes the cache holds. Sent before any request."""

    key: bytes


Action = Literal["sleep", "wake_up", "reset_prefix_cache"]
"""Methods of LLMEngine that a `Control` calls."""


class Control(msgspec.Struct, tag=True):
    """Call one of the engine's methods. The answer is a ControlDone; answers have the order of the calls."""

    action: Action


ToEngine = (
    Start | AddAny | AddMany | InspectAdapter | KeepAdapters | Abort | SetCacheView | ReadBlocks | ShareHashes | Control
)


class Rows(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of some tokens: the arrays of TokenLogprobs, little-endian."""

    token_ids: bytes
    logprobs: bytes
    ranks: bytes

    @classmethod
    def pack(cls, logprobs: TokenLogprobs | None) -> Rows | None:
        """Convert the arrays to bytes; None stays None."""
        if logprobs is None:
            return None
        return cls(
            logprobs.token_ids.astype("<i4").tobytes(),
            logprobs.logprobs.astype("<f4").tobytes(),
            logprobs.ranks.astype("<i4").tobytes(),
        )

    def unpack(self) -> TokenLogprobs:
        """Convert the bytes to arrays."""
        ranks = np.frombuffer(self.ranks, "<i4")
        shape = len(ranks), -1
        token_ids, logprobs = np.frombuffer(self.token_ids, "<i4"), np.frombuffer(self.logprobs, "<f4")
        return TokenLogprobs(token_ids.reshape(shape), logprobs.reshape(shape), ranks)


class Vectors(msgspec.Struct, array_like=True, gc=False):
    """What was pooled, little-endian float32."""

    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def pack(cls, pooled: Pooled | None) -> Vectors | None:
        """Convert the array to bytes; None stays None."""
        return None if pooled is None else cls(pooled.shape, pooled.astype("<f4", copy=False).tobytes())

    def unpack(self) -> Pooled:
        """Convert the bytes to an array, which cannot be written."""
        return np.frombuffer(self.data, "<f4").reshape(self.shape)


class SequenceDelta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a sequence has added since the last delta, or a whole output of a beam search."""

    index: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: Rows | None = None
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of a beam search's output; None for other outputs."""
    accepted_drafts: list[int] = []
    """Places in `token_ids` of the tokens that were drafts."""
    predicted_drafts: list[int] = []
    """Places of those drafts that are from the request's prediction."""


class RequestDelta(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """What a request has added since the last delta."""

    key: int
    sequences: list[SequenceDelta]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: Rows | None = None
    """Log-probabilities of the prompt tokens that were scored since the last delta."""
    error: str | None = None
    """Why the request failed; None if it did not."""
    error_kind: str | None = None
    """Name of the exception with which the engine rejected the request, or in which it failed; None if there was none.
    """
    pooled: Vectors | None = None
    """What was made of the prompt's hidden states, at the end of a pooling request."""


class Ready(msgspec.Struct, tag=True):
    """The engine is ready for requests."""

    max_model_len: int
    stats: EngineStats
    num_bytes: int = 0
    """Memory that weights, activations and KV cache use, as planned."""
    pooler: PoolerInfo | None = None
    """What a pooling model can make; None if the model generates."""


class Heartbeat(msgspec.Struct, tag=True):
    """A sign of life, sent once a second as soon as the process has started."""

    progress: int
    """Grows with the work done; equal in two heartbeats if no progress was made between them."""
    is_busy: bool
    """Whether the engine has something to do, so that progress is expected."""


class StartFailed(msgspec.Struct, tag=True):
    """The engine could not be made, and the process ends."""

    kind: str
    """Name of the exception."""
    message: str


class StepDone(msgspec.Struct, tag=True):
    """The changes made by a step, or by messages while there was nothing to step."""

    deltas: list[RequestDelta]
    stats: EngineStats


class CacheFrame(msgspec.Struct, tag=True):
    """A frame of the cache view, or the answer to a ReadBlocks."""

    payload: bytes
    number: int = 0
    """Number of the ReadBlocks, whose answer is a list of tokens for each block, in msgpack; 0 for a frame."""


class PrefixReport(msgspec.Struct, tag=True):
    """The hashes of full blocks that the cache has held, or has no longer held, since the last report."""

    found: list[bytes]
    gone: list[bytes]


class ControlDone(msgspec.Struct, tag=True):
    """The answer to a Control."""

    result: bool
    """What the method returned; True if it returns nothing."""
    error_kind: str | None = None
    """Name of the exception that the method raised; None if it raised none."""
    error: str = ""


class AdapterInspected(msgspec.Struct, tag=True):
    """The answer to an InspectAdapter."""

    number: int
    adapter: KnownAdapter | None
    """None if it cannot be used."""
    error_kind: str = ""
    """Name of the exception that says why."""
    error: str = ""


Event = StepDone | CacheFrame | PrefixReport | ControlDone | AdapterInspected
"""What a running engine sends, besides heartbeats."""

ToClient = Ready | StartFailed | Heartbeat | Event

_encoder = msgspec.msgpack.Encoder()


def to_frame(message: ToEngine | ToClient) -> bytes:
    """Encode a message as a frame. Raises ProtocolError if it is too large, and msgspec's errors if it cannot be
    encoded, for example because of an integer of more than 64 bits."""
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    num_bytes = len(frame) - LENGTH_BYTES
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {num_bytes:,} bytes: at most {MAX_FRAME_BYTES:,} are allowed")
    frame[:LENGTH_BYTES] = num_bytes.to_bytes(LENGTH_BYTES, "little")
    return bytes(frame)


def frame_len(head: bytes) -> int:
    """Return the length of a frame's content from its first four bytes. Raises ProtocolError if it is too large."""
    num_bytes = int.from_bytes(head, "little")
    if num_bytes > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {num_bytes:,} bytes: at most {MAX_FRAME_BYTES:,} are allowed")
    return num_bytes


def read_frame(stream: BinaryIO) -> bytes | None:
    """Return the content of the next frame; None at the end of the stream, even within a frame."""
    head = stream.read(LENGTH_BYTES)
    if len(head) < LENGTH_BYTES:
        return None
    num_bytes = frame_len(head)
    body = stream.read(num_bytes)
    return body if len(body) == num_bytes else None

"""The plan of one step and what came of it: immutable values between scheduler, executor and commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from quire.common.params import LogprobsMode

BlockIds: TypeAlias = npt.NDArray[np.int32]
"""a block table: logical block index -> block_id"""

TokenIds: TypeAlias = npt.NDArray[np.int32]

MaskWords: TypeAlias = npt.NDArray[np.int32]
"""[ceil(vocab_size / 32)]"""

Pooled: TypeAlias = npt.NDArray[np.float32]
"""What a pooler makes of a sequence: [size], or [num_rows, size] where it makes a vector for each token"""

BlockPairs: TypeAlias = tuple[tuple[int, int], ...]
"""(source block, destination block), each in its own tier"""

Message = TypeVar("Message", "Batch", "StepResult")


class Transfer(NamedTuple):
    """Whole blocks copied from one tier to another. Tier 0 is the device's, 1 the host's."""

    source_tier: int
    target_tier: int
    pairs: BlockPairs


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The first `num_slots` slots of one block, copied to the same places of another, in all layers of their group."""

    group: int
    src_block: int
    dst_block: int
    num_slots: int


class Draw(msgspec.Struct, frozen=True):
    """How the next token of a sequence is chosen from its logits: the part that is the same for a request's life."""

    temperature: float
    top_k: int
    """Number of likeliest tokens to draw from; 0 for all."""
    top_p: float
    random_key: bytes
    """Determines the random number together with the position, and nothing else does."""
    index: int = 0
    """Index of the sample within its request."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, value added to its logit)"""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that may be drawn; None for all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The last token of each is not drawn after the others."""
    min_tokens: int = 0
    """Number of output tokens before one of `stop_token_ids` may be drawn."""
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are returned beside the drawn token's; None for no
    log-probabilities at all."""
    logprobs_mode: LogprobsMode | None = None
    """Which log-probabilities are returned; None for the engine's default."""
    processors: tuple[str, ...] = ()
    """Names of logits processors, to be looked up where the token is drawn."""

    @property
    def needs_history(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.processors
        )


class DrawnRows(msgspec.Struct, frozen=True, gc=False):
    """The last rows of a sequence's scheduled tokens: tokens are drawn from their logits.

    One row, as a rule. More where the last tokens scheduled are drafts: then each row draws the token that its draft
    must equal to be accepted, and the last row draws the token behind them all.
    """

    draws: tuple[Draw, ...]
    """A token is drawn with each of them from each row. Several where a prompt forks into samples."""
    num_prompt_tokens: int
    num_rows: int = 1
    history: TokenIds | None = None
    """[end]: all tokens of the sequence up to the last row, where a draw needs them. A row's own history is the part up
    to and with its token."""
    masks: tuple[MaskWords | None, ...] | None = None
    """By row, the tokens that may be drawn: bit `token_id % 32` of word `token_id // 32`. None for all tokens."""


class ScoredRows(msgspec.Struct, frozen=True, gc=False):
    """A run of rows whose logits give the log-probabilities of known tokens, which are usually the prompt's."""

    row: int
    """Index of the first row among the sequence's scheduled tokens."""
    token_ids: tuple[int, ...]
    """The token scored by each row, which is the one that follows the row's own."""
    num_top: int
    """Number of likeliest tokens returned beside each token."""


class PoolSpec(msgspec.Struct, frozen=True, gc=False):
    """What the model's pooler makes of hidden states: the part that is the same for a request's life."""

    task: str
    """One of the pooler's tasks."""
    dimensions: int | None = None
    """Number of an embedding's elements that are kept; None for all."""
    normalize: bool | None = None
    """Whether an embedding is scaled to length 1; None for what the model was trained with."""
    activation: bool | None = None
    """Whether classes and scores go through the model's activation; None for True."""


class PooledRows(msgspec.Struct, frozen=True, gc=False):
    """A run of rows whose hidden states are pooled into an embedding, scores, or a vector for each row."""

    row: int
    """Index of the first row among the sequence's scheduled tokens."""
    num_rows: int
    spec: PoolSpec


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of some tokens, one row for each."""

    token_ids: npt.NDArray[np.int32]
    """[num_rows, 1 + num_top]: the token itself, then the likeliest, which may include it, in order"""
    logprobs: npt.NDArray[np.float32]
    """[num_rows, 1 + num_top]"""
    ranks: npt.NDArray[np.int32]
    """[num_rows]: the token's place among all by likelihood, from 1"""


class Correction(NamedTuple):
    """What to make of the odds that a drafter states, since they say too little or too much."""

    factor: float = 1.0
    shifts: tuple[float, ...] = (0.0,)
    """By equal ranges of the odds from 0 to 1, what to add after that."""
    trust: float = 1.0
    """What to multiply with in the end, for this sequence."""

    def of(self, odds: float) -> float:
        """How probable a draft with these odds is."""
        shift = self.shifts[min(int(odds * len(self.shifts)), len(self.shifts) - 1)]
        return min(1.0, self.trust * min(1.0, max(0.0, self.factor * odds + shift)))


NO_CORRECTION = Correction()


class Ahead(msgspec.Struct, frozen=True, gc=False):
    """What a draft model does with a sequence in a step: it reads the tokens that are accepted, and drafts."""

    num_drafts: int = 0
    """Tokens to draft behind the one that is drawn. The block tables have room for them behind `end`."""
    unread: tuple[int, ...] = ()
    """The tokens before the step's that it has not read yet."""
    least_odds: tuple[float, ...] = ()
    """For each draft, the probability that it and all before it must have to be right, else it drafts no more; 0 for
    those that have none here."""
    following: int | None = None
    """The token behind the step's where it is known, since it is the prompt's."""
    correction: Correction = NO_CORRECTION
    """Of its odds."""
    num_more: int = 0
    """Tokens that it may draft beyond `num_drafts`, one for each draft of the step that is rejected."""


class Drafted(NamedTuple):
    """What a draft model expects behind the token that was drawn last."""

    token_ids: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()
    """How probable each seemed to it if those before are right."""


NOTHING_DRAFTED = Drafted()


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: the tokens to run, and which of their rows are wanted for what.

    A row is one token's place in the step; its position is `start` plus its index among `token_ids`.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    """The tokens to run now; drafts come last."""
    start: int
    """Position of the first of them: the number of tokens computed before this step."""
    block_tables: tuple[BlockIds, ...]
    """One for each KV cache group; they cover `end` tokens."""
    drawn: DrawnRows | None = None
    """None if more tokens must be computed after these, or if no token is drawn."""
    scored: ScoredRows | None = None
    pooled: PooledRows | None = None
    adapter: int = -1
    """The worker's slot of the LoRA adapter that these tokens run with; -1 for none."""
    token_type_ids: tuple[int, ...] | None = None
    """For each token, which text of a pair it belongs to; None for 0."""
    ahead: Ahead | None = None
    """None: no draft model reads this sequence now."""

    @property
    def end(self) -> int:
        """Tokens computed after this step, drafts included."""
        return self.start + len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        """How many of the last tokens are drafts."""
        return 0 if self.drawn is None else self.drawn.num_rows - 1


def accepted_drafts(scheduled: ScheduledSequence, drawn: tuple[int, ...]) -> list[int]:
    """The drafts that equal what was drawn in their place, up to the first that does not.

    A draw depends on its row alone, and a row on the tokens before it: each token is the one that would have been drawn
    without drafts (drafter-invariant decoding, arXiv 2408.07978).
    """
    drafts = scheduled.token_ids[len(scheduled.token_ids) - scheduled.num_drafts :]
    differing = (place for place, draft in enumerate(drafts) if draft != drawn[place])
    return list(drafts[: next(differing, None)])


class Batch(msgspec.Struct, frozen=True):
    """Everything the executor needs to know of one step. A plain value: msgpack can carry it (see `encode`)."""

    step: int
    sequences: tuple[ScheduledSequence, ...]
    transfers: tuple[Transfer, ...] = ()
    """Copies of whole blocks, in this order and before all else. Those away from the device come first: the blocks they
    read may be written by later ones, and by the step itself."""
    copies: tuple[SlotCopy, ...] = ()
    """Copy-on-write and reused parts of blocks, before the forward pass."""
    ignored: tuple[str, ...] = ()
    """Ids of requests that turned out never to fit; they have finished and are out of every queue."""

    @property
    def num_tokens(self) -> int:
        """Tokens to run in all."""
        num_tokens = 0
        for s in self.sequences:  # a loop takes fewer calls: each step asks
            num_tokens += len(s.token_ids)
        return num_tokens


class StepResult(msgspec.Struct, frozen=True):
    """What the executor returns for a Batch."""

    token_ids: tuple[int, ...]
    """The drawn tokens: by sequence, then by row, then by draw."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By index in `token_ids`, one row, where the draw wants it."""
    scored: dict[int, TokenLogprobs] = {}
    """By the sequence's index in the batch, one row for each scored token."""
    pooled: dict[int, Pooled] = {}
    """By the sequence's index in the batch, what the pooler made of its rows."""
    pool_errors: dict[int, str] = {}
    """By the sequence's index in the batch: how pooling failed there. Other sequences are not affected."""
    errors: dict[int, str] = {}
    """By index in `token_ids`: how a request's own work failed there. That token means nothing."""
    drafted: dict[int, Drafted] = {}
    """By the index in the batch of each sequence that a draft model has read, what it drafted."""
    drafting_s: float = 0.0
    """The seconds that the draft model took."""
    has_lost_drafts: bool = False
    """Whether the draft model failed, which costs this step's drafts alone."""

    @property
    def num_passes(self) -> int:
        """How often the draft model ran to draft."""
        return max([len(drafted.token_ids) for drafted in self.drafted.values()]) if self.drafted else 0


def encode(message: Batch | StepResult) -> bytes:
    """The message in msgpack, arrays as their dtype, shape and little-endian bytes."""
    return _encoder.encode(message)


def decode(data: bytes, kind: type[Message]) -> Message:
    """The inverse of `encode`. Raises msgspec.ValidationError for anything but an encoded `kind`."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decode_array)


def _encode_array(value: object) -> object:
    if isinstance(value, np.ndarray):
        return _ARRAY_NAMES.get(value.dtype) or str(value.dtype), value.shape, np.ascontiguousarray(value).data
    raise TypeError(f"a batch holds plain values and arrays, not {type(value).__name__}")


def _decode_array(kind: type, value: Any) -> npt.NDArray[Any]:
    """Raises ValueError where the parts do not make an array."""
    name, shape, data = value
    if name not in _ARRAY_DTYPES:
        raise ValueError(f"an array of {name!r}: allowed are {', '.join(_ARRAY_DTYPES)}")
    return np.frombuffer(data, _ARRAY_DTYPES[name]).reshape(shape)


_ARRAY_DTYPES = {name: np.dtype(name) for name in ("int32", "float32")}
_ARRAY_NAMES = {dtype: name for name, dtype in _ARRAY_DTYPES.items()}
_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)

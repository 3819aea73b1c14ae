"""The plan of one step and what came of it: immutable values between scheduler, executor and commit."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from quire.common.params import LogprobsMode

BlockIds = npt.NDArray[np.int32]
"""a block table: logical block index -> block_id"""

BlockPairs = tuple[tuple[int, int], ...]
"""(source block, destination block), each in its own tier"""


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


class LogitsProcessor(Protocol):
    """A caller's own change of the logits, before anything else is done to them."""

    def __call__(self, output_token_ids: list[int], logits: Any, /) -> Any:
        """The tokens generated so far and logits [vocab] float32 (a torch tensor of its own) -> changed logits."""
        ...


class TokenMask(Protocol):
    """What may come next in a sequence, by its grammar."""

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        """Set bit `token_id % 32` of words[token_id // 32] for every token that may come next, and clear the others."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """How the next token of a sequence is chosen from its logits: what of it stays the same for a request's life."""

    temperature: float
    top_k: int
    """0: all"""
    top_p: float
    random_key: bytes
    """with the position, it determines the random number; nothing else does"""
    index: int = 0
    """of the sample in its request"""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    allowed_token_ids: tuple[int, ...] | None = None
    """no other is drawn; None: all are allowed"""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """the last token of each is not drawn after the others"""
    min_tokens: int = 0
    """none of `stop_token_ids` is drawn before so many output tokens"""
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """log-probabilities wanted: of the token drawn and of so many of the likeliest; None: of none"""
    logprobs_mode: LogprobsMode | None = None
    """which ones; None: those that the engine was told to give"""
    processors: tuple[LogitsProcessor, ...] = ()

    @property
    def needs_past(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1.0
            or self.bad_words
            or self.processors
        )


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens given beforehand, the prompt's as a rule, whose log-probabilities are wanted."""

    row: int
    """the first is predicted by this one of the tokens scheduled, the next by the next, and so on"""
    token_ids: tuple[int, ...]
    num_top: int
    """so many of the likeliest tokens are told besides"""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of some tokens, one row for each."""

    token_ids: npt.NDArray[np.int32]
    """[num_rows, 1 + num_top]: the token itself, then the likeliest, which it may be one of, in order"""
    logprobs: npt.NDArray[np.float32]
    """[num_rows, 1 + num_top]"""
    ranks: npt.NDArray[np.int32]
    """[num_rows]: the token's place among all by likelihood, from 1"""


class ScheduledSequence(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step. A struct, since hundreds are made in every step."""

    seq_id: int
    token_ids: tuple[int, ...]
    """the tokens to run now"""
    start: int
    """position of the first of them: tokens computed before this step"""
    block_tables: tuple[BlockIds, ...]
    """one per KV cache group; they cover `end` tokens"""
    draws: tuple[Draw, ...]
    """a token is drawn with each: several where a prompt forks into samples, none where tokens are left after these"""
    num_prompt_tokens: int = 0
    past: npt.NDArray[np.int32] | None = None
    """[end]: all its tokens up to these, where a draw needs them"""
    mask: TokenMask | None = None
    """what may be drawn; None: anything"""
    scored: Scored | None = None

    @property
    def end(self) -> int:
        """Tokens computed after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the executor needs to know of one step."""

    step: int
    sequences: tuple[ScheduledSequence, ...]
    transfers: tuple[Transfer, ...] = ()
    """To be done in this order, before all else. Those away from the device come first: the blocks that they read may
    be written by those that follow, and by the step itself."""
    copies: tuple[SlotCopy, ...] = ()
    """copy-on-write and reused parts of blocks, before the forward pass"""
    ignored: tuple[str, ...] = ()
    """request ids that turned out not to fit, now or ever; they have finished and are out of every queue"""

    @property
    def num_tokens(self) -> int:
        """Tokens to run in all."""
        return sum(len(s.token_ids) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the executor brings back."""

    token_ids: tuple[int, ...]
    """one for each draw, in the order of the scheduled sequences"""
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """one row, by place in `token_ids`, where the draw wants it"""
    scored: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    """one row for each scored token, by place of the sequence in the batch"""
    errors: Mapping[int, str] = field(default_factory=dict)
    """by place in `token_ids`: how a request's own code failed there; that token means nothing"""

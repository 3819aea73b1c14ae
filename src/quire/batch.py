"""The plan of one step and what came of it: immutable values between scheduler, executor and commit."""

from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]
"""a block table: logical block index -> block_id"""


BlockPairs = tuple[tuple[int, int], ...]
"""(source block, destination block), each in its own tier"""


@dataclass(frozen=True, slots=True)
class SlotCopy:
    """The first `num_slots` slots of one block, copied to the same places of another, in all layers of their group."""

    group: int
    src_block: int
    dst_block: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Draw:
    """How the next token of a sequence is chosen from its logits."""

    temperature: float
    top_k: int
    top_p: float
    random_key: bytes
    """with the position, it determines the random number; nothing else does"""
    index: int = 0
    """of the sample in its request"""


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

    @property
    def end(self) -> int:
        """Tokens computed after this step."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """Everything the executor needs to know of one step."""

    step: int
    sequences: tuple[ScheduledSequence, ...]
    swap_out: BlockPairs = ()
    """from the device tier to the host's, before all else: the blocks may be written in this very step"""
    swap_in: BlockPairs = ()
    """from the host tier back"""
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
    """What the executor brings back: a token for each draw, in the order of the scheduled sequences."""

    token_ids: tuple[int, ...]

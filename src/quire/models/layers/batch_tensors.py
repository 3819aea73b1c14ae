"""The inputs of one forward pass, as tensors: what a model's `forward` takes besides the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from quire import kernels


def most_read(num_tokens: int) -> int:
    """The most tokens of a step that a last layer computes without the others, negative if it always computes all. With
    more, or fewer than 32 others, it would save no time: it computes keys and values of these tokens twice."""
    return min(2 * num_tokens // 3, num_tokens - 32)


@dataclass(frozen=True, slots=True)
class GroupTensors:
    """Where one KV cache group's tokens live."""

    slots: Tensor
    """[num_tokens] int64: where each token's key and value are written"""
    block_tables: Tensor
    """[num_seqs, max_blocks] int32: logical block index -> block_id; rows are padded with 0"""


@dataclass(frozen=True, slots=True)
class BatchTensors:
    """The tokens of all scheduled sequences, one after another, without padding."""

    token_ids: Tensor | None
    """[num_tokens] int64. None only if `embeddings` are given."""
    positions: Tensor
    """[num_tokens] int64: the position of each token in its sequence. A model whose `num_position_rows` is greater than
    1 takes [num_position_rows, num_tokens]."""
    query_start: Tensor
    """[num_seqs + 1] int32: sequence s owns rows query_start[s] to query_start[s + 1]"""
    seq_lens: Tensor
    """[num_seqs] int32: tokens of each sequence once this step is done (computed before + scheduled now)"""
    groups: tuple[GroupTensors, ...]
    """one per KVCacheGroup"""
    logit_rows: Tensor
    """[num_logits] int64: the rows whose logits are wanted"""
    embeddings: Tensor | None = None
    """[num_tokens, width of the token table]: what the layers start from, in the place of the tokens' rows of the
    table. The model computes in this memory, so it holds something else afterwards."""
    adapters: Tensor | None = None
    """[num_tokens] int64: the slot of each token's adapter, -1 for none. None: no token has one."""
    token_type_ids: Tensor | None = None
    """[num_tokens] int64: which text of a pair each token belongs to. None: all are 0."""
    states: Tensor | None = None
    """[num_tokens, width]: the hidden states that a draft head reads beside the embeddings, and computes in."""
    read: "ReadRows | None" = None
    """The tokens whose hidden states are read, for a model that can narrow its last layer to them. None: all."""

    @property
    def whole(self) -> "BatchTensors":
        """For layers that compute all tokens."""
        return self if self.read is None else replace(self, read=None)

    @property
    def of_hidden(self) -> "BatchTensors":
        """The batch of the tokens whose hidden states the model gives."""
        return self if self.read is None else self.read.batch

    @property
    def first_rows(self) -> Sequence[int]:
        """The row of each sequence's first token among those that the model gives, or what it would be: less than that
        of the first one that is read."""
        return self.query_start[:-1].tolist() if self.read is None else self.read.first_rows

    def narrowed(self, rows: Tensor) -> "tuple[Tensor, BatchTensors]":
        """rows [num_tokens, width] and the batch -> those of the tokens that are read."""
        return (rows, self) if self.read is None else (kernels.embedding(self.read.rows, rows), self.read.batch)


@dataclass(frozen=True, slots=True)
class ReadRows:
    """Some of a batch's tokens: of each sequence, some that follow one another, or none."""

    rows: Tensor
    """[num_read] int64: their rows in the batch"""
    batch: BatchTensors
    """the batch that has these tokens alone, of sequences that end with them"""
    first_rows: Sequence[int] = ()
    """the row that each sequence's first token has there, or would have if all before those that are read were there"""


class LayerCache(Protocol):
    """One layer's part of the cache, viewed in the kernels' shape, and the group whose block table it follows."""

    @property
    def group(self) -> int:
        """The index of the group."""

    def copy_slots(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """Copy what the layer keeps of single tokens from slots to slots, each [num_tokens] int64."""


@dataclass(frozen=True, slots=True)
class LayerKVCache:
    """Keys and values."""

    k: Tensor
    """[num_blocks, num_kv_heads, head_dim / pack, block_size, pack]; pack elements fill four bytes (int8: two more such
    lanes are scales)"""
    v: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim]"""
    group: int

    def copy_slots(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """As LayerCache."""
        kernels.copy_slots(self.k, self.v, src_slots, dst_slots)


@dataclass(frozen=True, slots=True)
class LayerLatents:
    """Latents, each with the rotated part of the keys behind it."""

    rows: Tensor
    """[num_blocks, block_size, width]"""
    group: int

    def copy_slots(self, src_slots: Tensor, dst_slots: Tensor) -> None:
        """As LayerCache."""
        kernels.copy_latent_slots(self.rows, src_slots, dst_slots)


NO_CACHE = LayerKVCache(torch.empty(0), torch.empty(0), -1)
"""What a layer gets that keeps nothing."""

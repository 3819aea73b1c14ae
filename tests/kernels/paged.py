"""Sequences with known queries, keys and values, and paged caches that hold any part of them in any placement."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.kernels.backends import reference_attention
from quire.kernels.variants import PLAIN, AttentionVariant
from tests.kernels.isas import PAIRED_ISAS
from tests.kernels.tolerances import assert_close

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    """none: as dtype"""


@dataclass(frozen=True)
class Stream:
    """One sequence: what its tokens ask for, and what they store."""

    query: Tensor
    """[num_tokens, num_heads, head_dim]"""
    key: Tensor
    """[num_tokens, num_kv_heads, head_dim], value likewise"""
    value: Tensor

    def __len__(self) -> int:
        return len(self.query)


def make_stream(heads: Heads, num_tokens: int, seed: int) -> Stream:
    generator = torch.Generator().manual_seed(seed)

    def random(num_heads: int) -> Tensor:
        return torch.randn(num_tokens, num_heads, heads.head_dim, generator=generator).to(heads.dtype)

    return Stream(random(heads.num_heads), random(heads.num_kv_heads), random(heads.num_kv_heads))


class PagedBatch:
    """A layer's cache in which the streams lie in shuffled blocks; what they do not fill is NaN (int8: its scales)."""

    def __init__(self, heads: Heads, streams: Sequence[Stream], block_size: int, seed: int = 0) -> None:
        self.heads, self.streams, self.block_size = heads, streams, block_size
        blocks = [-(-len(stream) // block_size) for stream in streams]
        num_blocks = sum(blocks) + 2
        dtype = heads.cache_dtype or heads.dtype
        head_bytes = heads.head_dim + 4 if dtype is torch.int8 else heads.head_dim * dtype.itemsize
        num_bytes = num_blocks * block_size * 2 * heads.num_kv_heads * head_bytes
        self.buffer = torch.full((num_bytes,), 255, dtype=torch.uint8)
        self.k_cache, self.v_cache = kernels.make_layer_cache(
            self.buffer, num_blocks, block_size, heads.num_kv_heads, heads.head_dim, dtype
        )
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.block_tables = torch.full((len(streams), max(blocks) + 1), -1, dtype=torch.int32)
        for s, count in enumerate(blocks):
            self.block_tables[s, :count] = torch.tensor([order.pop() for _ in range(count)])

    def slots(self, s: int, begin: int, end: int) -> Tensor:
        positions = torch.arange(begin, end)
        return self.block_tables[s].long()[positions // self.block_size] * self.block_size + positions % self.block_size

    def inputs(self, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Write tokens [begin, end) of each stream, and give paged_attention's tensors for them."""
        for s, (begin, end) in enumerate(spans):
            stream = self.streams[s]
            kernels.write_kv(
                stream.key[begin:end], stream.value[begin:end], self.k_cache, self.v_cache, self.slots(s, begin, end)
            )
        query = torch.cat([stream.query[begin:end] for stream, (begin, end) in zip(self.streams, spans, strict=True)])
        starts = torch.tensor([0] + [end - begin for begin, end in spans]).cumsum(0).int()
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
        return query, self.k_cache, self.v_cache, starts, ends, self.block_tables

    def attend(self, spans: Sequence[tuple[int, int]], variant: AttentionVariant = PLAIN) -> list[Tensor]:
        """Compute the next tokens of each stream, all in one call; the outputs per stream."""
        scale = self.heads.head_dim**-0.5
        out = kernels.paged_attention(*self.inputs(spans), scale, variant)
        return list(out.split([end - begin for begin, end in spans]))


def attend_alone(heads: Heads, stream: Stream, variant: AttentionVariant = PLAIN) -> Tensor:
    """The same stream computed as one prefill, by itself."""
    return PagedBatch(heads, [stream], block_size=16).attend([(0, len(stream))], variant)[0]


def check_against_reference(
    heads: Heads, lens: list[int], query_lens: list[int], block_size: int, variant: AttentionVariant = PLAIN
) -> None:
    """Whole lengths of the sequences, and of how many of their last tokens the outputs are compared."""
    streams = [make_stream(heads, n, seed) for seed, n in enumerate(lens)]
    batch = PagedBatch(heads, streams, block_size)
    for s, (n, query_len) in enumerate(zip(lens, query_lens, strict=True)):  # the context computed before
        batch.inputs([(0, n - query_len) if i == s else (0, 0) for i in range(len(lens))])
    inputs = batch.inputs([(n - query_len, n) for n, query_len in zip(lens, query_lens, strict=True)])
    scale = heads.head_dim**-0.5
    actual = kernels.paged_attention(*inputs, scale, variant)
    kernel = "paged_attention" if heads.cache_dtype is None else "paged_attention_int8"
    if inputs[1].dtype is torch.bfloat16 and kernels.isa() in PAIRED_ISAS:
        kernel = "paged_attention_pairs"
    assert_close(kernel, actual, reference_attention.paged_attention(*inputs[:3], inputs[3:], scale, variant))


def same_bits(actual: Tensor, expected: Tensor) -> bool:
    """Equal bit for bit: zeros of the same sign, NaN of the same kind."""
    return torch.equal(actual.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))

"""The kernels of multi-head latent attention: one row of a token for the keys and values of all heads."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference_attention
from tests.effort import examples
from tests.kernels.isas import ISAS, PAIRED_ISAS, native, needs_native, using
from tests.kernels.paged import same_bits
from tests.kernels.test_attention import schedules
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]


@dataclass(frozen=True)
class Latents:
    num_heads: int
    rank: int
    rotary_dim: int
    dtype: torch.dtype

    @property
    def width(self) -> int:
        return self.rank + self.rotary_dim


@dataclass(frozen=True)
class Stream:
    query: Tensor
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)


def make_stream(kind: Latents, num_tokens: int, seed: int) -> Stream:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(num_tokens, kind.num_heads, kind.width, generator=generator)
    return Stream(query.to(kind.dtype), torch.randn(num_tokens, kind.width, generator=generator).to(kind.dtype))


class PagedLatents:
    """A cache in which the streams lie in shuffled blocks; what they do not fill is NaN."""

    def __init__(self, kind: Latents, streams: Sequence[Stream], block_size: int, seed: int = 0) -> None:
        self.kind, self.streams, self.block_size = kind, streams, block_size
        blocks = [-(-len(stream) // block_size) for stream in streams]
        num_blocks = sum(blocks) + 2
        self.buffer = torch.full((num_blocks * block_size * kind.width * kind.dtype.itemsize,), 255, dtype=torch.uint8)
        self.cache = kernels.make_latent_cache(self.buffer, num_blocks, block_size, kind.width, kind.dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        self.block_tables = torch.full((len(streams), max(blocks) + 1), -1, dtype=torch.int32)
        for s, count in enumerate(blocks):
            self.block_tables[s, :count] = torch.tensor([order.pop() for _ in range(count)])

    def inputs(self, spans: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
        """Write tokens [begin, end) of each stream, and give the kernel's tensors for them."""
        for s, (begin, end) in enumerate(spans):
            positions = torch.arange(begin, end)
            blocks = self.block_tables[s].long()[positions // self.block_size]
            latents, rotary = self.streams[s].rows[begin:end].split([self.kind.rank, self.kind.rotary_dim], dim=1)
            slots = blocks * self.block_size + positions % self.block_size
            kernels.write_latents(latents, rotary, self.cache, slots)
        query = torch.cat([stream.query[begin:end] for stream, (begin, end) in zip(self.streams, spans, strict=True)])
        starts = torch.tensor([0] + [end - begin for begin, end in spans]).cumsum(0).int()
        ends = torch.tensor([end for _, end in spans], dtype=torch.int32)
        return query, self.cache, starts, ends, self.block_tables

    def attend(self, spans: Sequence[tuple[int, int]]) -> list[Tensor]:
        out = kernels.latent_attention(*self.inputs(spans), self.kind.rank, self.kind.width**-0.5)
        return list(out.split([end - begin for begin, end in spans]))


def check_against_reference(kind: Latents, lens: list[int], query_lens: list[int], block_size: int) -> None:
    batch = PagedLatents(kind, [make_stream(kind, n, seed) for seed, n in enumerate(lens)], block_size)
    batch.inputs([(0, n - count) for n, count in zip(lens, query_lens, strict=True)])
    inputs = batch.inputs([(n - count, n) for n, count in zip(lens, query_lens, strict=True)])
    actual = kernels.latent_attention(*inputs, kind.rank, kind.width**-0.5)
    is_paired = kind.dtype is torch.bfloat16 and kernels.isa() in PAIRED_ISAS
    name = "latent_attention_pairs" if is_paired else "latent_attention"
    assert_close(
        name, actual, reference_attention.latent_attention(*inputs[:2], inputs[2:], kind.rank, kind.width**-0.5)
    )


@pytest.mark.essential
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "rank", "rotary_dim"), [(1, 2, 2), (3, 24, 8), (16, 64, 16), (5, 70, 6), (16, 512, 64), (130, 32, 4)]
)
def test_a_mixed_batch_matches_the_reference(isa, dtype, num_heads, rank, rotary_dim):
    with using(isa):
        check_against_reference(Latents(num_heads, rank, rotary_dim, dtype), [1, 130, 70, 600], [1, 30, 70, 2], 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 3, 8, 20, 48, 128, 160])
@pytest.mark.parametrize("rotary_dim", [8, 32])  # with 32, AMX multiplies on tiles
def test_any_block_size_matches_the_reference(isa, dtype, block_size, rotary_dim):
    with using(isa):
        check_against_reference(Latents(6, 32, rotary_dim, dtype), [200, 65, 64], [9, 65, 1], block_size)


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(15), deadline=None)
@given(
    schedule=schedules(),
    kind=st.builds(
        Latents,
        st.sampled_from([1, 4, 11, 20]),
        st.sampled_from([8, 26, 64]),
        st.sampled_from([2, 16, 32]),
        st.sampled_from(DTYPES),
    ),
    block_size=st.sampled_from([1, 5, 16, 32]),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_batch_chunks_blocks_or_threads(isa, schedule, kind, block_size, num_threads, seed):
    lens, steps = schedule
    streams = [make_stream(kind, n, seed + i) for i, n in enumerate(lens)]
    with using(isa, num_threads=1):
        alone = [PagedLatents(kind, [stream], 16).attend([(0, len(stream))])[0] for stream in streams]
    with using(isa, num_threads):
        batch = PagedLatents(kind, streams, block_size, seed)
        done = [0] * len(lens)
        for step in steps:
            spans = [(begin, begin + count) for begin, count in zip(done, step, strict=True)]
            for s, out in enumerate(batch.attend(spans)):
                assert same_bits(out, alone[s][slice(*spans[s])])
            done = [end for _, end in spans]


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_sequences_share_is_read_once_and_gives_the_same_bits(dtype):
    kind, num_seqs = Latents(4, 32, 8, dtype), 5
    streams = [make_stream(kind, 1124, seed=s) for s in range(num_seqs)]
    for stream in streams:
        stream.rows[:1024] = streams[0].rows[:1024]
    batch = PagedLatents(kind, streams, block_size=16)
    batch.inputs([(0, 1123)] * num_seqs)
    apart = batch.attend([(1123, 1124)] * num_seqs)
    assert native.attention_sections_read() == 3 * num_seqs, "512 positions each, once for all heads"
    batch.block_tables[1:, : 1024 // 16] = batch.block_tables[0, : 1024 // 16]
    shared = batch.attend([(1123, 1124)] * num_seqs)
    assert native.attention_sections_read() == 2 + num_seqs
    assert all(map(same_bits, shared, apart))


@pytest.mark.parametrize("dtype", DTYPES)
def test_written_rows_are_where_the_reference_puts_them_and_slots_can_be_copied(dtype):
    fused = torch.randn(9, 40).to(dtype)
    latents, rotary = fused[:, 4:30], fused[:, 30:38]
    slots = torch.randperm(24)[:9]
    pool = torch.zeros(4, 1000, dtype=torch.uint8)
    cache = kernels.make_latent_cache(pool[:, 100:], 4, 6, 34, dtype) if dtype is torch.bfloat16 else None
    cache = torch.zeros(4, 6, 34, dtype=dtype) if cache is None else cache
    expected = torch.zeros(4, 6, 34, dtype=dtype)
    kernels.write_latents(latents, rotary, cache, slots)
    reference_attention.write_latents(latents, rotary, expected, slots)
    assert torch.equal(cache, expected)
    free = [slot for slot in range(24) if slot not in slots.tolist()][:9]
    kernels.copy_latent_slots(cache, slots, torch.tensor(free))
    assert torch.equal(cache.flatten(0, 1)[free], torch.cat([latents, rotary], dim=1))


@pytest.mark.essential
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "n", "k", "tail"),
    [(0, 2, 4, 4, 0), (1, 16, 512, 128, 64), (3, 5, 33, 7, 2), (70, 2, 10, 64, 1), (300, 3, 40, 24, 0)],
)
def test_products_by_head_match_the_reference_and_rows_alone(isa, dtype, num_tokens, num_heads, n, k, tail):
    weights = torch.randn(num_heads, n, k).mul(k**-0.5).to(dtype)
    x = torch.full((num_tokens, num_heads + 1, k + tail + 3), torch.nan).to(dtype)[:, 1:, 3:]
    x.copy_(torch.randn(x.shape))
    with using(isa):
        packed = kernels.pack_heads(weights)
        out = kernels.multiply_heads(x, packed)
        assert_close("multiply_heads", out, reference_attention.multiply_heads(x, weights))
        for row in {0, num_tokens // 2, num_tokens - 1} if num_tokens and native is not None else ():
            with using(isa, num_threads=1):
                assert same_bits(kernels.multiply_heads(x[row : row + 1], packed)[0], out[row])


class TestRefusals:
    def call(self, value_dim: int = 32, **changes: Tensor) -> Tensor:
        kind = Latents(4, 32, 8, torch.bfloat16)
        names = ("query", "cache", "query_start", "seq_lens", "block_tables")
        inputs = PagedLatents(kind, [make_stream(kind, 20, seed=0)], block_size=16).inputs([(0, 20)])
        return kernels.latent_attention(**dict(zip(names, inputs, strict=True)) | changes, value_dim=value_dim, scale=1)

    @pytest.mark.parametrize(
        "changes",
        [
            {"query": torch.zeros(20, 4, 40)},  # dtype
            {"query": torch.zeros(20, 4, 32, dtype=torch.bfloat16)},  # width
            {"query": torch.zeros(20, 40, 4, dtype=torch.bfloat16).transpose(1, 2)},  # strides
            {"query": torch.zeros(20, 160, dtype=torch.bfloat16)},
            {"cache": torch.zeros(4, 16, 40, dtype=torch.int8)},
            {"cache": torch.zeros(4, 16, 80, dtype=torch.bfloat16)[:, :, ::2]},  # strides
            {"seq_lens": torch.tensor([20])},  # dtype
            {"value_dim": 41},
            {"value_dim": 0},
        ],
    )
    def test_wrong_shapes_strides_and_dtypes(self, changes):
        with pytest.raises(KernelError, match=r"latent_attention takes contiguous query .*; got query: "):
            self.call(**changes)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_tables": torch.tensor([[0, 4]], dtype=torch.int32)}, r"block id 4 .*is not in \[0, 4\)"),
            ({"block_tables": torch.tensor([[0]], dtype=torch.int32)}, "20 tokens|block table of 1 blocks"),
            ({"seq_lens": torch.tensor([19], dtype=torch.int32)}, "20 query tokens"),
            ({"query_start": torch.tensor([1, 20], dtype=torch.int32)}, "query_start must r"),
        ],
    )
    def test_values_that_would_read_outside_the_cache(self, changes, message):
        with pytest.raises(KernelError, match=message):
            self.call(**changes)

    def test_caches_writes_copies_and_products_that_do_not_fit(self):
        buffer, cache = torch.zeros(4096, dtype=torch.uint8), torch.zeros(2, 4, 6)
        with pytest.raises(KernelError, match="a cache of latents has positive sizes"):
            kernels.make_latent_cache(buffer, 2, 4, 5, torch.bfloat16)
        with pytest.raises(KernelError, match="the buffer must be flat uint8"):
            kernels.make_latent_cache(buffer, 64, 16, 6, torch.bfloat16)
        with pytest.raises(KernelError, match="write_latents takes latents"):
            kernels.write_latents(torch.zeros(1, 4), torch.zeros(1, 4), cache, torch.tensor([0]))
        with pytest.raises(KernelError, match="slot 8"):
            kernels.write_latents(torch.zeros(1, 4), torch.zeros(1, 2), cache, torch.tensor([8]))
        with pytest.raises(KernelError, match="copy_latent_slots takes a cache"):
            kernels.copy_latent_slots(cache.int(), torch.tensor([0]), torch.tensor([1]))
        with pytest.raises(KernelError, match="destination slot -1"):
            kernels.copy_latent_slots(cache, torch.tensor([0]), torch.tensor([-1]))
        with pytest.raises(KernelError, match="pack_heads takes weights"):
            kernels.pack_heads(torch.zeros(2, 3))
        with pytest.raises(KernelError, match=r"multiply_heads takes x \[num_tokens, 2, at least 3\]"):
            kernels.multiply_heads(torch.zeros(1, 2, 2), kernels.pack_heads(torch.zeros(2, 4, 3)))

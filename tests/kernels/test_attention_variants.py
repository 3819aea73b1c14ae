"""Soft caps, sinks, ALiBi slopes and chunks, beside sliding windows."""

import dataclasses
import math

import pytest
import torch

from quire import kernels
from quire.common.errors import KernelError
from quire.config.kv_cache import SlidingWindowSpec
from quire.kernels.variants import AttentionVariant
from quire.kv.managers.attention import SlidingWindowManager
from tests.kernels.isas import ISAS, needs_native, using
from tests.kernels.paged import Heads, PagedBatch, attend_alone, check_against_reference, make_stream, same_bits

DTYPES = [torch.float32, torch.bfloat16]
STORAGE = [(dtype, cache_dtype) for cache_dtype in (None, torch.int8) for dtype in DTYPES]
LENS, QUERY_LENS = [700, 130, 1, 41], [150, 130, 1, 1]


def sinks(num_heads: int) -> torch.Tensor:
    return torch.linspace(-3.0, 4.0, num_heads)


def slopes(num_heads: int) -> torch.Tensor:
    return 2.0 ** -(8 * torch.arange(1.0, num_heads + 1) / num_heads)


def everything(num_heads: int) -> AttentionVariant:
    return AttentionVariant(100, 256, 5.0, sinks(num_heads), slopes(num_heads))


VARIANTS = {
    "chunk of 1": AttentionVariant(chunk_size=1),
    "chunk of 64": AttentionVariant(chunk_size=64),
    "chunk of 100": AttentionVariant(chunk_size=100),
    "chunk of 10000": AttentionVariant(chunk_size=10_000),
    "chunk of 200, window of 150": AttentionVariant(150, 200),
    "softcap 0.5": AttentionVariant(softcap=0.5),
    "softcap 1.2e-38": AttentionVariant(softcap=1.2e-38),
    "softcap 1.7e38": AttentionVariant(softcap=1.7e38),
    "softcap 50": AttentionVariant(softcap=50.0),
    "softcap 50, window of 33": AttentionVariant(33, softcap=50.0),
    "sinks": AttentionVariant(sinks=sinks(4)),
    "sinks, window of 128": AttentionVariant(128, sinks=sinks(4)),
    "slopes": AttentionVariant(slopes=slopes(4)),
    "slopes, window of 500": AttentionVariant(500, slopes=slopes(4)),
    "everything": everything(4),
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_matches_the_reference(isa, dtype, cache_dtype, variant):
    with using(isa):
        check_against_reference(Heads(4, 2, 32, dtype, cache_dtype), LENS, QUERY_LENS, 16, VARIANTS[variant])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("head_dim", [12, 32, 64, 80, 96, 128, 256])
def test_all_variants_at_once_match_the_reference_for_each_head_dim(isa, dtype, cache_dtype, head_dim):
    heads = Heads(6, 2, head_dim, dtype, cache_dtype)
    with using(isa):
        check_against_reference(heads, [1, 130, 600], [1, 30, 2], 16, everything(6))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (5, 5), (6, 2), (14, 2), (64, 1)])
def test_all_variants_at_once_match_the_reference_for_grouped_heads(isa, dtype, cache_dtype, num_heads, num_kv_heads):
    heads = Heads(num_heads, num_kv_heads, 16, dtype, cache_dtype)
    with using(isa):
        check_against_reference(heads, [290, 17], [90, 1], 20, everything(num_heads))


@pytest.mark.parametrize("isa", ISAS)
def test_the_formula_in_float64(isa):
    """The cap, then the slope, then the mask, then the sink."""
    heads, n = Heads(2, 2, 16, torch.float32), 60
    variant = AttentionVariant(30, 40, 2.0, torch.tensor([0.5, -1.0]), torch.tensor([0.5, 0.03]))
    stream = make_stream(heads, n, seed=1)
    query, key, value = (t.double().transpose(0, 1) for t in (stream.query, stream.key, stream.value))
    position = torch.arange(n)
    distance = position[:, None] - position  # of a query from a key
    scores = 2.0 * torch.tanh(query @ key.mT / 4 / 2.0) - variant.slopes.double()[:, None, None] * distance
    sees = (distance >= 0) & (distance < 30) & (position[:, None] // 40 == position // 40)
    weights = scores.exp() * sees
    total = weights.sum(-1, keepdim=True) + variant.sinks.double().exp()[:, None, None]
    with using(isa):
        actual = attend_alone(heads, stream, variant)
    torch.testing.assert_close(actual.double(), (weights @ value / total).transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("sink", [-1e30, -100.0, 0.0, 100.0, 1e30])
def test_a_sink_of_any_size_takes_its_share_and_nothing_else(isa, sink):
    """All scores are 0: of n keys and the sink each value gets 1 / (n + e^sink)."""
    heads = Heads(1, 1, 16, torch.float32)
    stream = make_stream(heads, 1100, seed=2)
    stream.query[:] = 0
    stream.value[:] = 1
    with using(isa):
        out = attend_alone(heads, stream, AttentionVariant(sinks=torch.tensor([sink])))
    share = math.exp(sink) if sink < 500 else math.inf
    n = torch.arange(1, 1101, dtype=torch.float64)
    expected = (n / (n + share)).float()[:, None, None].expand_as(out)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-30)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("spans", [(None, None), (None, 1300), (700, None)])
def test_a_long_decode_spread_over_threads_counts_each_sink_once(isa, dtype, cache_dtype, spans):
    heads = Heads(14, 2, 64, dtype, cache_dtype)
    variant = AttentionVariant(*spans, 20.0, sinks(14), slopes(14))
    batch = PagedBatch(heads, [make_stream(heads, 2500, seed=1)], block_size=16)
    batch.inputs([(0, 2400)])
    with using(isa, num_threads=1):
        prefilled = batch.attend([(2400, 2500)], variant)[0]
    for num_threads in (1, 2, 5):
        with using(isa, num_threads):
            assert same_bits(batch.attend([(2499, 2500)], variant)[0], prefilled[-1:])
            assert same_bits(batch.attend([(2400, 2500)], variant)[0], prefilled)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("chunk", [16, 50, 600])
def test_what_a_window_of_the_chunks_size_frees_is_never_read(isa, dtype, cache_dtype, chunk):
    """So a layer of chunked attention may have the KV cache spec of a sliding window of that size."""
    heads, n, block_size = Heads(4, 2, 16, dtype, cache_dtype), 1300, 16
    variant = AttentionVariant(chunk_size=chunk)
    manager = SlidingWindowManager(SlidingWindowSpec(2, 16, "float32", chunk), block_size)
    batch = PagedBatch(heads, [make_stream(heads, n, seed=5)], block_size)
    blocks = batch.block_tables[0].long()
    with using(isa):
        expected = batch.attend([(0, n)], variant)[0]
        for begin in (chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 1199, 1200, n - 1):
            freed = manager.first_needed(begin)
            batch.buffer.view(len(batch.k_cache), -1)[blocks[:freed]] = 255  # NaN
            batch.block_tables[0, :freed] = -1
            query, *inputs = batch.inputs([(begin, begin + 1)])
            out = kernels.paged_attention(query, *inputs, 16**-0.5, variant)
            assert same_bits(out, expected[begin : begin + 1])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_a_variant_that_changes_nothing_has_the_plain_bits(isa, cache_dtype):
    heads = Heads(4, 2, 64, torch.bfloat16, cache_dtype)
    stream = make_stream(heads, 700, seed=3)
    with using(isa):
        plain = attend_alone(heads, stream)
        for variant in (AttentionVariant(700, 700), AttentionVariant(slopes=torch.zeros(4))):
            assert same_bits(attend_alone(heads, stream, variant), plain)
        sunk = attend_alone(heads, stream, AttentionVariant(sinks=torch.full((4,), -1e30)))
        torch.testing.assert_close(sunk, plain, rtol=2**-7, atol=0)


@needs_native
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
def test_a_recording_reads_sinks_and_slopes_in_place(cache_dtype):
    heads = Heads(4, 2, 16, torch.float32, cache_dtype)
    inputs = PagedBatch(heads, [make_stream(heads, 300, seed=0)], 16).inputs([(0, 300)])
    variant = everything(4)
    graph = kernels.backend_for("cpu").graph()
    with kernels.Workspace().recording(), graph.record():
        out = kernels.paged_attention(*inputs, 0.25, variant)
    assert len(graph) == 1
    for _ in range(2):
        assert same_bits(out, kernels.paged_attention(*inputs, 0.25, variant))
        variant.sinks.add_(1)
        variant.slopes.mul_(2)
        before = out.clone()
        graph.replay()
        assert not torch.equal(out, before)


def test_on_the_meta_device_the_output_is_all_that_is_allocated():
    heads = Heads(4, 2, 16, torch.float32)
    inputs = [t.to("meta") for t in PagedBatch(heads, [make_stream(heads, 30, seed=0)], 16).inputs([(0, 30)])]
    on_meta = torch.zeros(4, device="meta")
    meter = kernels.Meter()
    with meter.counting():
        out = kernels.paged_attention(*inputs, 0.25, AttentionVariant(9, 8, 1.0, on_meta, on_meta))
    assert out.shape == (30, 4, 16)
    assert meter.peak_bytes == out.nbytes


@pytest.mark.parametrize(
    ("values", "given"),
    [
        ({"sliding_window": 0}, "sliding_window: 0"),
        ({"sliding_window": -1}, "sliding_window: -1"),
        ({"chunk_size": 0}, "chunk_size: 0"),
        ({"softcap": 0.0}, "softcap: 0.0"),
        ({"softcap": -30.0}, "softcap: -30.0"),
        ({"softcap": math.inf}, "softcap: inf"),
        ({"softcap": math.nan}, "softcap: nan"),
        ({"softcap": 1e-40}, "softcap: 1e-40"),
        ({"softcap": 1.8e38}, "softcap: 1.8e"),
        ({"sliding_window": 2**63}, "sliding_window: 9223372036854775808"),
        ({"sliding_window": 1.5}, "sliding_window: 1.5"),
        ({"chunk_size": 2**63}, "chunk_size: 9223372036854775808"),
    ],
)
def test_values_that_leave_nothing_to_see_are_refused(values, given):
    with pytest.raises(KernelError, match=f"AttentionVariant takes .*{given}"):
        AttentionVariant(**values)


def test_a_variant_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AttentionVariant(1).sliding_window = 2  # type: ignore[misc]

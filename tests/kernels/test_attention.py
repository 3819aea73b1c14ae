from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.variants import PLAIN, AttentionVariant
from tests.effort import examples
from tests.kernels.isas import ISAS, native, needs_native, using
from tests.kernels.paged import Heads, PagedBatch, Stream, attend_alone, check_against_reference, make_stream, same_bits

DTYPES = [torch.float32, torch.bfloat16]
STORAGE = [(dtype, cache_dtype) for cache_dtype in (None, torch.int8) for dtype in DTYPES]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 10, 32, 40, 48, 64, 72, 80, 96, 128, 160, 256])
def test_mixed_batch_matches_the_reference_for_each_head_dim(isa, dtype, head_dim):
    with using(isa):
        check_against_reference(Heads(6, 2, head_dim, dtype), [1, 130, 70, 600], [1, 30, 70, 2], 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [4, 12, 32, 48, 64, 80, 96, 100, 128, 160, 256, 1024])
def test_a_mixed_batch_over_int8_matches_the_reference_for_each_head_dim(isa, dtype, head_dim):
    with using(isa):
        check_against_reference(Heads(6, 2, head_dim, dtype, torch.int8), [1, 130, 70, 600], [1, 30, 70, 2], 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (4, 1), (5, 1), (14, 2), (9, 1), (64, 1)])
def test_grouped_multi_and_single_key_heads_match_the_reference(isa, dtype, cache_dtype, num_heads, num_kv_heads):
    with using(isa):
        check_against_reference(Heads(num_heads, num_kv_heads, 32, dtype, cache_dtype), [90, 17], [90, 1], 16)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("block_size", [1, 3, 4, 8, 16, 20, 48, 128])
def test_any_block_size_matches_the_reference(isa, dtype, cache_dtype, block_size):
    with using(isa):
        check_against_reference(Heads(4, 2, 32, dtype, cache_dtype), [200, 65, 64], [9, 65, 1], block_size)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("window", [1, 5, 64, 100, 511, 10_000])
def test_sliding_windows_match_the_reference(isa, dtype, cache_dtype, window):
    with using(isa):
        check_against_reference(
            Heads(4, 2, 16, dtype, cache_dtype), [700, 130, 1], [150, 130, 1], 16, AttentionVariant(window)
        )


def test_float32_agrees_with_the_textbook_formula():
    heads = Heads(4, 2, 64, torch.float32)
    stream = make_stream(heads, 100, seed=3)
    key, value = (t.repeat_interleave(2, dim=1).transpose(0, 1) for t in (stream.key, stream.value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        stream.query.transpose(0, 1), key, value, is_causal=True
    ).transpose(0, 1)
    torch.testing.assert_close(attend_alone(heads, stream), expected, rtol=1e-5, atol=1e-5)


@st.composite
def schedules(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    """Lengths of some sequences, and how many tokens of each one every step computes."""
    lens = draw(st.lists(st.one_of(st.integers(1, 90), st.integers(500, 1100)), min_size=1, max_size=4))
    left, steps = list(lens), []
    while any(left):
        step = [min(n, draw(st.sampled_from([0, 1, 1, 2, 7, 64, 300, 2000]))) for n in left]
        if not any(step):
            step = left  # else this could go on for ever
        left = [n - taken for n, taken in zip(left, step, strict=True)]
        steps.append(step)
    return lens, steps


def variants() -> st.SearchStrategy[Callable[[int], AttentionVariant]]:
    """Variants for any number of heads; half of them plain."""

    def made(
        window: int | None, chunk: int | None, softcap: float | None, has_sinks: bool, has_slopes: bool
    ) -> Callable[[int], AttentionVariant]:
        def of(num_heads: int) -> AttentionVariant:
            sinks = torch.linspace(-2.0, 3.0, num_heads) if has_sinks else None
            slopes = 2.0 ** -torch.arange(1.0, num_heads + 1) if has_slopes else None
            return AttentionVariant(window, chunk, softcap, sinks, slopes)

        return of

    some = st.builds(
        made,
        st.sampled_from([None, None, 1, 33, 64, 300, 900]),
        st.sampled_from([None, None, 1, 50, 128, 700]),
        st.sampled_from([None, 0.5, 30.0]),
        st.booleans(),
        st.booleans(),
    )
    return st.one_of(st.just(made(None, None, None, False, False)), some)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
def test_a_prompt_in_items_of_many_rows_has_the_bits_of_its_chunks(isa, dtype, cache_dtype):
    heads, length = Heads(14, 2, 32, dtype, cache_dtype), 300  # 4,200 rows; items of few rows up to 3,071
    with using(isa, num_threads=2):
        whole = attend_alone(heads, make_stream(heads, length, 0))
        batch = PagedBatch(heads, [make_stream(heads, length, 0)], 16)
        assert same_bits(whole, torch.cat([batch.attend([(at, at + 100)])[0] for at in range(0, length, 100)]))


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(25), deadline=None)
@given(
    schedule=schedules(),
    heads=st.builds(
        lambda group, kv, dim, storage: Heads(group * kv, kv, dim, *storage),
        st.sampled_from([1, 2, 7]),
        st.sampled_from([1, 2]),
        st.sampled_from([8, 16, 36]),
        st.sampled_from(STORAGE),
    ),
    block_size=st.sampled_from([1, 5, 8, 16, 32]),
    variant=variants(),
    num_threads=st.integers(1, 4),
    seed=st.integers(0, 1000),
)
def test_bits_do_not_depend_on_batch_chunks_blocks_or_threads(
    isa, schedule, heads, block_size, variant, num_threads, seed
):
    variant = variant(heads.num_heads)
    lens, steps = schedule
    streams = [make_stream(heads, n, seed + i) for i, n in enumerate(lens)]
    with using(isa, num_threads=1):
        alone = [attend_alone(heads, stream, variant) for stream in streams]
    with using(isa, num_threads):
        batch = PagedBatch(heads, streams, block_size, seed)
        done = [0] * len(lens)
        for step in steps:
            spans = [(begin, begin + count) for begin, count in zip(done, step, strict=True)]
            for s, out in enumerate(batch.attend(spans, variant)):
                assert same_bits(out, alone[s][slice(*spans[s])])
            done = [end for _, end in spans]


@st.composite
def families(draw: st.DrawFn) -> list[tuple[int, int, int, int]]:
    """Per sequence: the one it continues, how many tokens they share, how many it adds, and its query's length."""
    sequences, lens = [], list[int]()
    for s in range(draw(st.integers(2, 7))):
        parent = draw(st.integers(max(0, s - 2), max(0, s - 1)))
        query_len = draw(st.sampled_from([0, 1, 1, 1, 3, 40, 130]))
        shared = draw(st.integers(0, lens[parent])) if s else 0
        added = query_len + draw(st.one_of(st.integers(1, 40), st.integers(500, 1200)))
        sequences.append((parent, shared, added, query_len))
        lens.append(shared + added - query_len)  # what others may share is in the cache
    return sequences


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=examples(25), deadline=None)
@given(
    family=families(),
    group=st.sampled_from([1, 3, 7]),
    storage=st.sampled_from(STORAGE),
    block_size=st.sampled_from([8, 16, 20, 48]),
    variant=variants(),
    num_threads=st.integers(1, 3),
)
def test_bits_do_not_depend_on_which_sequences_share_blocks(
    isa, family, group, storage, block_size, variant, num_threads
):
    variant = variant(2 * group)
    heads, streams = Heads(2 * group, 2, 16, *storage), list[Stream]()
    for s, (parent, shared, added, _) in enumerate(family):
        own = make_stream(heads, shared + added, seed=s)
        for mine, inherited in ((own.key, streams[parent].key), (own.value, streams[parent].value)) if s else ():
            mine[:shared] = inherited[:shared]
        streams.append(own)
    spans = [(len(stream) - query_len, len(stream)) for stream, (*_, query_len) in zip(streams, family, strict=True)]
    with using(isa, num_threads):
        batch = PagedBatch(heads, streams, block_size)
        batch.inputs([(0, begin) for begin, _ in spans])
        alone = batch.attend(spans, variant)
        for s, (parent, shared, *_) in enumerate(family):
            blocks = shared // block_size
            freed = batch.block_tables[s, :blocks].clone() if s else batch.block_tables[s, :0]
            batch.block_tables[s, : len(freed)] = batch.block_tables[parent, : len(freed)]
            batch.buffer.view(len(batch.k_cache), -1)[freed.long()] = 255  # NaN
        assert all(map(same_bits, batch.attend(spans, variant), alone))


@needs_native
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("query_len", [1, 4])
def test_what_sequences_share_is_read_once_for_all_of_them(num_threads, query_len):
    num_seqs, shared_len, own_len = 5, 3 * 512, 100
    heads = Heads(4, 2, 16, torch.bfloat16)
    streams = [make_stream(heads, shared_len + own_len, seed=s) for s in range(num_seqs)]
    spans = [(shared_len + own_len - query_len, shared_len + own_len)] * num_seqs
    with using(kernels.isa(), num_threads):
        batch = PagedBatch(heads, streams, block_size=16)
        batch.inputs([(0, begin) for begin, _ in spans])
        batch.attend(spans)
        assert native.attention_sections_read() == num_seqs * 4 * 2, "512 positions each, of two heads"
        batch.block_tables[1:, : shared_len // 16] = batch.block_tables[0, : shared_len // 16]
        batch.attend(spans)
        assert native.attention_sections_read() == (3 + num_seqs) * 2


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
def test_a_long_decode_spread_over_threads_has_the_bits_of_the_prefill(isa, dtype, cache_dtype):
    heads = Heads(14, 2, 64, dtype, cache_dtype)
    stream = make_stream(heads, 2500, seed=1)
    batch = PagedBatch(heads, [stream], block_size=16)
    batch.inputs([(0, 2400)])
    with using(isa, num_threads=1):
        prefilled = batch.attend([(2400, 2500)])[0]
    for num_threads in (1, 2, 5):
        with using(isa, num_threads):
            assert same_bits(batch.attend([(2499, 2500)])[0], prefilled[-1:])
            assert same_bits(batch.attend([(2400, 2500)])[0], prefilled)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_an_output_that_underflows_has_the_same_zero_in_decode_and_prefill(isa):
    heads = Heads(1, 1, 16, torch.float32)
    query, key, value = torch.zeros(3, 3, 1, 16)
    query[:, :, 0] = 1.0
    key[1, :, 0] = -69.0  # e^-69 times the value is too small for a float32, and negative
    value[1], value[2] = -1e-30, 1.0
    batch = PagedBatch(heads, [Stream(query, key, value)], block_size=16)
    with using(isa):
        prefilled = kernels.paged_attention(*batch.inputs([(0, 3)]), 1.0)
        assert same_bits(kernels.paged_attention(*batch.inputs([(1, 2)]), 1.0), prefilled[1:2])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_over_int8_a_query_of_zeros_averages_and_extreme_keys_decide(isa):
    heads = Heads(1, 1, 16, torch.float32, torch.int8)
    query, key, value = torch.zeros(3, 4, 1, 16)
    key[2] = 1e30
    value[:, 0] = torch.tensor([1.0, 3.0, -5.0, 1.0])[:, None]
    query[3] = 1e-8
    with using(isa):
        out = PagedBatch(heads, [Stream(query, key, value)], block_size=16).attend([(0, 4)])[0]
    expected = torch.tensor([1.0, 2.0, -1 / 3, -5.0])[:, None, None].expand(4, 1, 16)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@needs_native
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("isa", ISAS)
def test_keys_outside_the_window_and_their_blocks_are_never_read(isa, cache_dtype):
    heads = Heads(2, 1, 16, torch.bfloat16, cache_dtype)
    stream = make_stream(heads, 300, seed=5)
    batch = PagedBatch(heads, [stream], block_size=16)
    with using(isa):
        expected = batch.attend([(0, 300)], AttentionVariant(20))[0]
        batch.buffer.view(len(batch.k_cache), -1)[batch.block_tables[0, :17].long()] = 255  # NaN
        batch.block_tables[0, :17] = -1  # freed
        assert torch.equal(batch.attend([(299, 300)], AttentionVariant(20))[0], expected[-1:])


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_neither_overflow_nor_lose_the_maximum(isa):
    heads = Heads(1, 1, 16, torch.float32)
    stream = make_stream(heads, 150, seed=2)
    batch = PagedBatch(heads, [stream], block_size=16)
    with using(isa):
        out = kernels.paged_attention(*batch.inputs([(0, 150)]), 1e30)
    products = stream.query[:, 0] @ stream.key[:, 0].T
    best = products.masked_fill(torch.ones(150, 150).triu(1) > 0, -torch.inf)
    assert torch.equal(out[:, 0], stream.value[best.argmax(1), 0])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "cache_dtype"), STORAGE)
@pytest.mark.parametrize("query_len", [1, 3, 700])
def test_scores_far_below_zero_weigh_as_much_as_the_same_scores_near_zero(isa, dtype, cache_dtype, query_len):
    """All scores are -1000 or 0, so the weights are equal: each output is the mean of the values that its row sees."""
    heads = Heads(2, 1, 16, dtype, cache_dtype)
    means = []
    for score in (-1000.0, 0.0):
        stream = make_stream(heads, 700, seed=4)
        stream.query[:], stream.key[:] = score / 16, 1.0
        batch = PagedBatch(heads, [stream], block_size=16)
        with using(isa):
            batch.inputs([(0, 700 - query_len)])
            means.append(kernels.paged_attention(*batch.inputs([(700 - query_len, 700)]), 1.0))
    assert means[0].isfinite().all()
    torch.testing.assert_close(means[0], means[1], rtol=1e-2, atol=1e-3)


def test_queries_may_be_a_slice_of_a_fused_projection():
    heads = Heads(4, 2, 16, torch.bfloat16)
    stream = make_stream(heads, 40, seed=9)
    query, *rest = PagedBatch(heads, [stream], block_size=16).inputs([(0, 40)])
    fused = torch.cat([query, stream.key, stream.value], dim=1)
    out = kernels.paged_attention(fused[:, :4], *rest, 0.25)
    assert out.is_contiguous()
    assert torch.equal(out, kernels.paged_attention(query, *rest, 0.25))


def test_no_tokens_give_no_rows():
    heads = Heads(2, 1, 16, torch.float32)
    batch = PagedBatch(heads, [make_stream(heads, 5, seed=0)], block_size=4)
    assert batch.attend([(0, 0)])[0].shape == (0, 2, 16)


def cache_of_zeros(num_blocks, num_kv_heads, block_size, head_dim):
    return {
        "k_cache": torch.zeros(num_blocks, num_kv_heads, head_dim // 2, block_size, 2, dtype=torch.bfloat16),
        "v_cache": torch.zeros(num_blocks, num_kv_heads, block_size, head_dim, dtype=torch.bfloat16),
    }


class TestRefusals:
    def call(self, variant: AttentionVariant = PLAIN, **changes: torch.Tensor) -> torch.Tensor:
        heads = Heads(4, 2, 16, torch.bfloat16)
        names = ("query", "k_cache", "v_cache", "query_start", "seq_lens", "block_tables")
        batch = PagedBatch(heads, [make_stream(heads, 20, seed=0)], block_size=16)
        inputs = dict(zip(names, batch.inputs([(0, 20)]), strict=True)) | changes
        return kernels.paged_attention(**inputs, scale=1.0, variant=variant)

    @pytest.mark.parametrize(
        "changes",
        [
            {"query": torch.zeros(20, 4, 16)},  # dtype
            {"query": torch.zeros(20, 3, 16, dtype=torch.bfloat16)},  # not a multiple of the key heads
            {"query": torch.zeros(20, 4, 8, dtype=torch.bfloat16)},  # head_dim
            {"query": torch.zeros(20, 16, 4, dtype=torch.bfloat16).transpose(1, 2)},  # strides
            {"query": torch.zeros(20, 64, dtype=torch.bfloat16)},  # dimensions
            {"k_cache": torch.zeros(3, 2, 8, 8, 2, dtype=torch.bfloat16)},  # block size
            {"v_cache": torch.zeros(3, 16, 16, 2, dtype=torch.bfloat16).permute(0, 3, 1, 2)},  # strides
            {"query_start": torch.tensor([0, 20])},  # dtype
            {"query_start": torch.tensor([0, 10, 20], dtype=torch.int32)},  # one sequence too many
            {"seq_lens": torch.tensor([[20]], dtype=torch.int32)},  # dimensions
            {"block_tables": torch.zeros(2, 2, dtype=torch.int32)},  # one sequence too many
            {"query": torch.zeros(20, 0, 16, dtype=torch.bfloat16)},  # no heads
            cache_of_zeros(4, 0, 16, 16),  # no key heads
            cache_of_zeros(4, 2, 0, 16),  # no slots
            cache_of_zeros(4, 2, 16, 0) | {"query": torch.zeros(20, 4, 0, dtype=torch.bfloat16)},  # no dimensions
            {"block_tables": torch.zeros(1, 4, dtype=torch.int32)[:, ::2]},  # strides
            {"k_cache": torch.zeros(4, 2, 6, 16, 4, dtype=torch.int8)},  # one int8 cache
            {
                "k_cache": torch.zeros(4, 2, 4, 16, 4, dtype=torch.int8),  # no lanes for scales
                "v_cache": torch.zeros(4, 2, 16, 16, dtype=torch.int8),
            },
        ],
    )
    def test_wrong_shapes_strides_and_dtypes(self, changes):
        with pytest.raises(KernelError, match=r"paged_attention takes query .*; got query: "):
            self.call(**changes)

    @pytest.mark.parametrize(
        ("variant", "given"),
        [
            (AttentionVariant(sinks=torch.zeros(2)), r"sinks: float32 \[2\]"),  # of the key heads
            (AttentionVariant(sinks=torch.zeros(4).bfloat16()), "sinks: bfloat16"),
            (AttentionVariant(slopes=torch.zeros(8)[::2]), r"slopes: float32 \[4\] strides"),
            (AttentionVariant(slopes=torch.zeros(4, device="meta")), "slopes: .* on meta"),
        ],
    )
    def test_sinks_and_slopes_that_do_not_fit_the_heads(self, variant, given):
        with pytest.raises(KernelError, match=f"sinks and slopes .*{given}"):
            self.call(variant)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"block_tables": torch.tensor([[0, 4]], dtype=torch.int32)}, r"block id 4 .*is not in \[0, 4\)"),
            ({"block_tables": torch.tensor([[-1, 0]], dtype=torch.int32)}, r"block id -1 .*is not in \[0, 4\)"),
            ({"block_tables": torch.tensor([[0]], dtype=torch.int32)}, "20 tokens|block table of 1 blocks"),
            ({"seq_lens": torch.tensor([19], dtype=torch.int32)}, "20 query tokens"),
            ({"query_start": torch.tensor([0, 19], dtype=torch.int32)}, "query_start must r"),
            ({"query_start": torch.tensor([1, 20], dtype=torch.int32)}, "query_start must r"),
        ],
    )
    def test_values_that_would_read_outside_the_cache(self, changes, message):
        with pytest.raises(KernelError, match=message):
            self.call(**changes)

"""Attention of whole sequences without a cache, and the kernels where an encoder begins and ends."""

import dataclasses

import pytest
import torch

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference_attention, reference_pooling
from quire.kernels.checks import POOLINGS
from quire.kernels.variants import DistanceTerms, EncoderVariant
from tests.kernels.isas import ISAS, PAIRED_ISAS, needs_native, using
from tests.kernels.paged import Heads, PagedBatch, make_stream, same_bits
from tests.kernels.tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]
LENS = [1, 130, 17, 600, 41]
REACH = 640


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def variant(num_heads: int, **changes: object) -> EncoderVariant:
    slopes = 2.0 ** -(8 * torch.arange(1.0, num_heads + 1) / num_heads)
    return dataclasses.replace(EncoderVariant(70, slopes, random(num_heads, 2 * REACH + 16, seed=9)), **changes)


VARIANTS = {
    "plain": EncoderVariant(),
    "window of 0": EncoderVariant(0),
    "window of 64": EncoderVariant(64),
    "slopes": variant(4, window=None, bias=None),
    "bias": variant(4, window=None, slopes=None),
    "everything": variant(4),
}


def starts(lens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([0, *lens]).cumsum(0).int(), torch.tensor(lens, dtype=torch.int32)


def inputs(lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype):
    """As a projection gives them: heads of queries, keys and values side by side."""
    rows = random(sum(lens), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    return (*rows.split([num_heads, num_kv_heads, num_kv_heads], dim=1), *starts(lens))


def distance_terms(num_tokens: int, num_heads: int) -> DistanceTerms:
    term = (torch.arange(-REACH, REACH + 1) // 40).clamp(-3, 3).int() + 3
    return DistanceTerms(random(num_tokens, num_heads, 7, seed=2), random(num_tokens, num_heads, 7, seed=3), term)


def compare(given, scale: float, how: EncoderVariant, terms: DistanceTerms | None = None) -> None:
    actual = kernels.encoder_attention(*given, scale, how, terms)
    is_pairs = given[0].dtype is torch.bfloat16 and kernels.isa() in PAIRED_ISAS
    expected = reference_attention.encoder_attention(*given, scale, how, terms)
    assert_close("encoder_attention_pairs" if is_pairs else "encoder_attention", actual, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", VARIANTS)
def test_each_variant_matches_the_reference(isa, dtype, name):
    with using(isa):
        compare(inputs(LENS, 4, 2, 32, dtype), 32**-0.5, VARIANTS[name])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(12, 12, 32), (6, 2, 80), (2, 1, 12), (3, 3, 64)])
def test_heads_of_any_size_match_the_reference(isa, dtype, num_heads, num_kv_heads, head_dim):
    with using(isa):
        compare(inputs([5, 290], num_heads, num_kv_heads, head_dim, dtype), head_dim**-0.5, variant(num_heads))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("without", [None, "of_query", "of_key"])
def test_terms_of_distances_match_the_reference(isa, dtype, without):
    terms = distance_terms(sum(LENS), 4)
    terms = terms if without is None else dataclasses.replace(terms, **{without: None})
    with using(isa):
        compare(inputs(LENS, 4, 4, 32, dtype), 0.1, variant(4, slopes=None), terms)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_alone_and_in_any_order(isa, dtype):
    given, terms = inputs(LENS, 4, 2, 32, dtype), distance_terms(sum(LENS), 4)
    with using(isa):
        together = kernels.encoder_attention(*given, 0.2, variant(4), terms).split(LENS)
        for threads in (1, 3):
            kernels.set_num_threads(threads)
            for order in ([0], [3], [4, 1, 3, 0, 2]):
                rows = torch.cat([torch.arange(sum(LENS[:i]), sum(LENS[: i + 1])) for i in order])
                lens = [LENS[i] for i in order]
                moved = [x[rows] for x in given[:3]]
                of_query, of_key = terms.of_query[rows], terms.of_key[rows]
                part = DistanceTerms(of_query, of_key, terms.term)
                out = kernels.encoder_attention(*moved, *starts(lens), 0.2, variant(4), part)
                assert all(same_bits(a, together[i]) for a, i in zip(out.split(lens), order, strict=True))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_short_text_has_the_bits_that_its_last_token_has_in_a_paged_cache(isa, dtype):
    """Texts that fit into a vector have a loop of their own. The last token sees all keys there as here."""
    heads = Heads(6, 3, 32, dtype)
    with using(isa):
        for num_tokens in range(1, 19):
            text = make_stream(heads, num_tokens, seed=num_tokens)
            given = text.query, text.key, text.value, *starts([num_tokens])
            alone = kernels.encoder_attention(*given, heads.head_dim**-0.5, EncoderVariant())
            (paged,) = PagedBatch(heads, [text], 16).attend([(0, num_tokens)])
            if kernels.isa() == "reference":
                torch.testing.assert_close(alone[-1], paged[-1])
            else:
                assert same_bits(alone[-1], paged[-1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("head_dim", [16, 32, 64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_short_texts_match_the_reference(isa, window, head_dim, dtype):
    with using(isa):
        for num_tokens in (1, 2, 7, 11, 16):
            compare(inputs([num_tokens, 3, 40], 4, 2, head_dim, dtype), 0.2, EncoderVariant(window))


@pytest.mark.parametrize("isa", ISAS)
def test_what_does_not_fit_is_refused(isa):
    query, key, value, query_start, seq_lens = inputs([3, 5], 4, 2, 8, torch.float32)
    bias = torch.zeros(4, 2 * 3 + 16)
    with using(isa):
        for changed in (
            {"key": key[:7]},
            {"value": value[:, :1]},
            {"key": key.bfloat16()},
            {"query_start": query_start.long()},
            {"seq_lens": seq_lens[:1]},
            {"variant": EncoderVariant(bias=bias[:3])},
            {"variant": EncoderVariant(slopes=torch.zeros(3))},
            {"terms": DistanceTerms(None, None, torch.zeros(7, dtype=torch.int32))},
            {"terms": DistanceTerms(torch.zeros(8, 4, 2), torch.zeros(8, 4, 3), torch.zeros(7, dtype=torch.int32))},
            {"query_start": torch.tensor([0, 2, 8], dtype=torch.int32)},
            {"variant": EncoderVariant(bias=bias)},
            {"query": query[:, :0]},
            {"query": query[..., :0], "key": key[..., :0], "value": value[..., :0]},
            {"terms": DistanceTerms(torch.zeros(8, 4, 2), None, torch.tensor([0, 1, 0, 0, 0, 0, 0, 0, 2]).int())},
            {"terms": DistanceTerms(None, torch.zeros(8, 4, 2), torch.tensor([-1, 1, 0, 0, 0, 0, 0, 0, 0]).int())},
        ):
            given = {"query": query, "key": key, "value": value, "query_start": query_start, "seq_lens": seq_lens}
            with pytest.raises(KernelError):
                kernels.encoder_attention(**given | {"scale": 1.0} | changed)
    for window in (-1, 2**63, 1.5):
        with pytest.raises(KernelError, match=f"window of at least 0, .*window: {window}"):
            EncoderVariant(window)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [7, 32, 384])
@pytest.mark.parametrize("num_tables", [1, 2, 3])
@pytest.mark.parametrize("has_bias", [True, False])
def test_norms_of_embeddings_match_the_reference(isa, dtype, width, num_tables, has_bias):
    ids = [torch.tensor([3, 0, 9, 9]), None, torch.tensor([0, 1, 2, 3])][:num_tables]
    tables = [(random(10, width, seed=i, dtype=dtype), rows) for i, rows in enumerate(ids)]
    weight, bias = random(width, seed=5), random(width, seed=6) if has_bias else None
    with using(isa):
        actual = kernels.embedding_norm(tables, weight, bias, 1e-12)
    assert_close("embedding_norm", actual, reference_pooling.embedding_norm(tables, weight, bias, 1e-12))


@pytest.mark.parametrize("isa", ISAS)
def test_embeddings_that_a_table_does_not_have_are_refused(isa):
    table, weight, ids = random(4, 8), random(8), torch.tensor([1, 2])
    with using(isa):
        for tables in (
            [(table, torch.tensor([1, 4]))],
            [(table, ids), (table, torch.tensor([0, -1]))],
            [(table, None)],
            [],
            [(table, ids)] * 4,
            [(table, ids), (table.bfloat16(), ids)],
            [(table, ids), (table, ids[:1])],
            [(table, ids), (table[:0], None)],
        ):
            with pytest.raises(KernelError):
                kernels.embedding_norm(tables, weight, None, 1e-12)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 384), (300, 70)])
def test_pooled_rows_match_the_reference(isa, dtype, pooling, rows, width):
    x = random(rows, width, dtype=dtype)
    with using(isa):
        assert_close("pool_rows", kernels.pool_rows(x, pooling), reference_pooling.pool_rows(x, pooling))
        with pytest.raises(KernelError, match="pool_rows takes at least one row"):
            kernels.pool_rows(x[:0], pooling)
        with pytest.raises(KernelError, match="'median'"):
            kernels.pool_rows(x, "median")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("row", [0, 1, 2])
def test_a_pooled_nan_stays(isa, pooling, row):
    x = random(3, 20)
    x[row, 3] = torch.nan
    with using(isa):
        assert kernels.pool_rows(x, pooling).isnan().nonzero().tolist() == [[3]]

"""Norms, activations, rotary embedding and embedding: the kernels that work on each row alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference
from quire.kernels.checks import ACTIVATIONS
from quire.kernels.variants import XIELU, ClampedSwiGLU
from tests.effort import examples

from .isas import ISAS, needs_native, using
from .tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(0, 8), (1, 1), (3, 5), (7, 48), (2, 897), (150, 256)]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norms(implementation, weight, bias):
    """Each norm as a function of x and a residual, returning its result and what became of the residual."""

    def with_residual(norm, *weights):
        return lambda x, residual: (norm(x, residual := residual.clone(), *weights, 1e-5), residual)

    layer_norm, add_layer_norm = implementation.layer_norm, implementation.add_layer_norm
    return {
        "rms_norm": lambda x, residual: (implementation.rms_norm(x, weight, 1e-6), residual),
        "add_rms_norm": with_residual(implementation.add_rms_norm, weight),
        "layer_norm": lambda x, residual: (layer_norm(x, weight, bias, 1e-5), residual),
        "layer_norm without bias": lambda x, residual: (layer_norm(x, weight, None, 1e-5), residual),
        "add_layer_norm": with_residual(add_layer_norm, weight, bias),
        "add_layer_norm without bias": with_residual(add_layer_norm, weight, None),
    }


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", norms(kernels, None, None))
def test_norms_are_the_references(isa, dtype, shape, norm):
    x, residual = randn(2, *shape).to(dtype)
    weight, bias = randn(2, shape[1], seed=1)
    expected, expected_residual = norms(reference, weight, bias)[norm](x, residual)
    with using(isa):
        actual, actual_residual = norms(kernels, weight, bias)[norm](x, residual)
    assert_close(norm.removesuffix(" without bias"), actual, expected)
    assert torch.equal(actual_residual, expected_residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_rounds_the_sum_once(isa, dtype, shape):
    x, residual = randn(2, *shape).to(dtype)
    expected = residual + x
    with using(isa):
        kernels.add(x, residual)
    assert torch.equal(residual, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_the_heads_of_a_fused_projection(isa, dtype):
    heads, weight = randn(9, 7, 20).to(dtype)[:, 2:6], randn(20)
    with using(isa):
        actual = kernels.rms_norm(heads, weight, 1e-6)
    assert actual.is_contiguous()
    assert_close("rms_norm", actual, reference.rms_norm(heads, weight, 1e-6))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_head_layer_norm_has_weights_for_each_head(isa, dtype, has_bias):
    heads, weight = randn(9, 7, 20).to(dtype)[:, 2:6], randn(4, 20, seed=1)
    bias = randn(4, 20, seed=2) if has_bias else None
    with using(isa):
        actual = kernels.head_layer_norm(heads, weight, bias, 1e-5)
        alone = kernels.head_layer_norm(heads[3:4], weight, bias, 1e-5)
    assert actual.is_contiguous()
    assert_close("head_layer_norm", actual, reference.head_layer_norm(heads, weight, bias, 1e-5))
    assert torch.equal(actual[3:4], alone)
    for head in range(4):
        own = None if bias is None else bias[head].contiguous()
        with using(isa):
            assert torch.equal(
                actual[:, head], kernels.layer_norm(heads[:, head].contiguous(), weight[head].clone(), own, 1e-5)
            )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_clip_leaves_the_heads_between_alone(isa, dtype):
    heads = randn(9, 7, 20).to(dtype)
    expected = heads.clone()
    expected[:, 2:6].clamp_(-0.7, 0.7)
    with using(isa):
        kernels.clip(heads[:, 2:6], 0.7)
    assert torch.equal(heads, expected)


@pytest.mark.parametrize("isa", ISAS)
def test_layer_norm_of_numbers_far_from_zero_keeps_its_digits(isa):
    """Summing squares before subtracting the mean would lose them all."""
    x, weight, bias = 1000 + randn(4, 77), torch.ones(77), torch.zeros(77)
    expected = torch.nn.functional.layer_norm(x.double(), (77,)).float()
    with using(isa):
        torch.testing.assert_close(kernels.layer_norm(x, weight, bias, 1e-5), expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (), (2, 3, 5)])
def test_scale_multiplies_by_a_float32_and_rounds_once(isa, dtype, shape):
    x = randn(*shape).to(dtype)
    expected = x.clone()
    reference.scale(expected, 59.86652)
    with using(isa):
        kernels.scale(x, 59.86652)
    assert_close("scale", x, expected)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (), (2, 3, 5)])
def test_clip_moves_what_is_outside_to_the_nearer_end(isa, dtype, shape):
    x = randn(*shape).to(dtype)
    if x.numel() > 4:
        x.view(-1)[:4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.7])
    expected = x.clone()
    reference.clip(expected, 0.7)
    with using(isa):
        kernels.clip(x, 0.7)
    assert torch.equal(x.nan_to_num(9), expected.nan_to_num(9))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("cap", [0.03, 30.0, 1e6])
def test_softcap_is_within_its_bound_of_float64_over_the_whole_range(isa, cap):
    """This bounds the error of the tanh that attention uses too."""
    some = torch.cat([torch.linspace(-30, 30, 40_001), torch.logspace(-30, 4, 2001), torch.tensor([0.0, torch.inf])])
    x = torch.cat([some, -some]) * cap
    expected = cap * torch.tanh(x.double() / cap)
    with using(isa):
        kernels.softcap(x, cap)
    torch.testing.assert_close(x.double(), expected, rtol=1e-6, atol=1e-35)
    assert x.abs().max() <= torch.tensor(cap)


@pytest.mark.parametrize("isa", ISAS)
def test_softcap_keeps_nan_and_the_signs_of_zeros(isa):
    x = torch.tensor([torch.nan, 0.0, -0.0])
    with using(isa):
        kernels.softcap(x, 30.0)
    assert x.isnan().tolist() == [True, False, False]
    assert x.signbit()[1:].tolist() == [False, True]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", SHAPES)
def test_softcap_is_the_references(isa, shape):
    x = 40 * randn(*shape)
    expected = x.clone()
    reference.softcap(expected, 30.0)
    with using(isa):
        kernels.softcap(x, 30.0)
    assert_close("softcap", x, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*ACTIVATIONS, XIELU(0.8, 1.3), XIELU(0.2, 0.7, 0.4)], ids=str)
def test_activations_are_the_references(isa, dtype, kind):
    with using(isa):
        for rows, width in SHAPES:
            x = 3 * randn(rows, 2 * width).to(dtype)
            assert_close("activation", kernels.activation(x, kind), reference.activation(x, kind))
            assert_close("gated_activation", kernels.gated_activation(x, kind), reference.gated_activation(x, kind))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gate_writes_to_columns_of_a_wider_result_and_leaves_the_others_alone(isa, dtype):
    with using(isa):
        for rows, width in SHAPES:
            x, whole = 3 * randn(rows, 2 * width).to(dtype), torch.full((rows, width + 9), 7.0, dtype=dtype)
            out = kernels.gated_activation(x, "silu", whole[:, 4 : 4 + width])
            assert torch.equal(out, kernels.gated_activation(x, "silu"))
            assert torch.equal(out, whole[:, 4 : 4 + width])
            assert whole[:, :4].eq(7).all()
            assert whole[:, 4 + width :].eq(7).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [ClampedSwiGLU(), ClampedSwiGLU(1.5, 1.0)], ids=str)
def test_a_gate_with_limits_is_the_references(isa, dtype, kind):
    with using(isa):
        for rows, width in SHAPES:
            x = 6 * randn(rows, 2 * width).to(dtype)
            assert_close("gated_activation", kernels.gated_activation(x, kind), reference.gated_activation(x, kind))
        ends = torch.tensor([[9.0, -9.0, 9.0, -9.0, torch.nan, 1.0, 9.0, -9.0, -9.0, 9.0, 1.0, torch.nan]])
        expected = reference.gated_activation(ends, kind)
        torch.testing.assert_close(kernels.gated_activation(ends, kind), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("isa", ISAS)
def test_xielu_agrees_with_float64_near_zero_and_far_from_it(isa):
    alpha_p, alpha_n, beta = 0.8, 1.3, 0.5
    x = torch.cat([torch.linspace(-40, 40, 4001), torch.tensor([-1e30, -1e-3, -1e-20, -0.0, 0.0, 1e-20, 1e15])])
    wide = x.double()
    expected = torch.where(wide > 0, alpha_p * wide**2, alpha_n * (wide.expm1() - wide)) + beta * wide
    with using(isa):
        actual = kernels.activation(x, XIELU(alpha_p, alpha_n, beta))
        assert kernels.activation(torch.tensor([torch.nan]), XIELU(alpha_p, alpha_n)).isnan().all()
    torch.testing.assert_close(actual.double(), expected, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_have_float32_digits_over_their_whole_range(isa, kind):
    """Against float64, where torch's own float32 has lost the small values far below zero."""
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([-1e30, -100, -0.0, 0.0, 1e-30, 100, 1e30])])
    expected = reference._ACTIVATIONS[kind](x.double())
    if kind == "gelu":
        expected = 0.5 * x.double() * torch.erfc(-x.double() / 2**0.5)
    elif kind == "gelu_tanh":
        expected = x.double() * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x.double() + 0.044715 * x.double() ** 3))
    with using(isa):
        if kernels.isa() != "reference":
            actual = kernels.activation(x, kind).double()
            torch.testing.assert_close(actual, expected.float().double(), rtol=2e-5, atol=1e-30)
        assert kernels.activation(torch.full((20,), torch.nan), kind).isnan().all()


@pytest.mark.parametrize("isa", ISAS)
def test_gelu_of_every_bfloat16_is_little_more_than_its_rounding_away(isa):
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    finite, tail = x[x.isfinite()], torch.tensor([-torch.inf, torch.inf, torch.nan], dtype=torch.bfloat16)
    expected = 0.5 * finite.double() * torch.erfc(-finite.double() / 2**0.5)
    with using(isa):
        actual, ends = kernels.activation(finite, "gelu").double(), kernels.activation(tail, "gelu")
    torch.testing.assert_close(actual, expected, rtol=2**-8 * 1.07, atol=2**-121)
    assert ends[1] == torch.inf
    assert ends[2].isnan()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [0, 2, 14, 20, 64, 322])
def test_heads_are_rotated_in_place_and_their_neighbours_left_alone(isa, dtype, rotary_dim, interleaved):
    qkv = randn(90, 12, max(64, rotary_dim)).to(dtype)
    positions, cos_sin = torch.arange(90) * 7 % 50, randn(50, rotary_dim, seed=1)
    expected = qkv.clone()
    reference.rotary_embedding(expected[:, 3:7], positions, cos_sin, interleaved)
    with using(isa):
        kernels.rotary_embedding(qkv[:, 3:7], positions, cos_sin, interleaved=interleaved)
    assert_close("rotary_embedding", qkv, expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_interleaved_pairs_are_the_halves_in_another_order(isa, dtype):
    halves = randn(9, 3, 40).to(dtype)
    pairs = halves.clone()
    pairs[..., :32] = halves[..., :32].unflatten(-1, (2, 16)).transpose(-1, -2).flatten(-2)
    positions, cos_sin = torch.arange(9), randn(9, 32, seed=1)
    with using(isa):
        kernels.rotary_embedding(halves, positions, cos_sin)
        kernels.rotary_embedding(pairs, positions, cos_sin, interleaved=True)
    assert torch.equal(pairs[..., :32].unflatten(-1, (16, 2)).transpose(-1, -2).flatten(-2), halves[..., :32])
    assert torch.equal(pairs[..., 32:], halves[..., 32:])


def changed(x, kernel, *arguments):
    """What becomes of a copy of x."""
    x = x.clone()
    kernel(x, *arguments)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "hidden"), [(1, 1), (77, 33), (200, 512)])
def test_embedding_gathers_rows_from_plain_and_packed_tables(dtype, vocab, hidden):
    table, token_ids = randn(vocab, hidden).to(dtype), torch.arange(300) * 31 % vocab
    for given_table in (table, kernels.pack_weight(table)):
        assert_close("embedding", kernels.embedding(token_ids, given_table), reference.embedding(token_ids, table))
        assert kernels.embedding(token_ids[:0], given_table).shape == (0, hidden)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@given(
    dtype=st.sampled_from(DTYPES),
    rows=st.integers(1, 120),
    half_width=st.integers(1, 300),
    row=st.integers(0, 119),
    threads=st.integers(1, 4),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(30), deadline=None)
def test_a_row_alone_has_the_bits_it_has_in_any_batch(isa, dtype, rows, half_width, row, threads, seed):
    row %= rows
    x, residual = randn(2, rows, 2 * half_width, seed=seed).to(dtype)
    weight, bias = randn(2, 2 * half_width, seed=seed)
    alone = slice(row, row + 1)
    for norm in norms(kernels, weight, bias).values():
        with using(isa, threads):
            whole, _ = norm(x, residual)
        with using(isa, 1):
            assert torch.equal(whole[alone], norm(x[alone], residual[alone])[0])
    with using(isa, threads):
        scaled, capped = changed(x, kernels.scale, 0.3), changed(x.float(), kernels.softcap, 2.0)
    with using(isa, 1):
        assert torch.equal(scaled[alone], changed(x[alone], kernels.scale, 0.3))
        assert torch.equal(capped[alone], changed(x[alone].float(), kernels.softcap, 2.0))
    for kind in (*ACTIVATIONS, XIELU(0.8, 1.3)):
        with using(isa, threads):
            whole, gated = kernels.activation(x, kind), kernels.gated_activation(x, kind)
        with using(isa, 1):
            assert torch.equal(whole[alone], kernels.activation(x[alone], kind))
            assert torch.equal(gated[alone], kernels.gated_activation(x[alone], kind))


WEIGHT = torch.zeros(8)
HEADS = torch.zeros(3, 2, 8)
POSITIONS = torch.zeros(3, dtype=torch.int64)
COS_SIN = torch.zeros(9, 8)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: kernels.add(torch.zeros(2, 8), torch.zeros(2, 7)), r"residual: float32 \[2, 7\]"),
        (lambda: kernels.rms_norm(torch.zeros(2, 7), WEIGHT, 1e-6), r"rms_norm takes .*got x: float32 \[2, 7\]"),
        (lambda: kernels.rms_norm(torch.zeros(8, 2).T, WEIGHT, 1e-6), r"strides \[1, 2\]"),
        (lambda: kernels.rms_norm(torch.zeros(2, 8).half(), WEIGHT, 1e-6), "float16"),
        (
            lambda: kernels.head_layer_norm(torch.zeros(2, 3, 8), WEIGHT, None, 1e-6),
            r"head_layer_norm takes .*\[num_heads, head_dim\].*got x: float32 \[2, 3, 8\]",
        ),
        (lambda: kernels.clip(torch.zeros(2, 3, 8)[:, :, :4], 1.0), "clip takes .*contiguous heads"),
        (lambda: kernels.rms_norm(torch.zeros(2, 8), WEIGHT.bfloat16(), 1e-6), "weight: bfloat16"),
        (lambda: kernels.rms_norm(torch.zeros(2, 8, device="meta"), WEIGHT, 1e-6), "on meta"),
        (
            lambda: kernels.add_rms_norm(torch.zeros(2, 8), torch.zeros(3, 8), WEIGHT, 1e-6),
            r"residual: float32 \[3, 8\]",
        ),
        (lambda: kernels.add_rms_norm(torch.zeros(2, 8), torch.zeros(2, 8).bfloat16(), WEIGHT, 1e-6), "bfloat16"),
        (lambda: kernels.layer_norm(torch.zeros(2, 8), WEIGHT, torch.zeros(7), 1e-6), r"bias: float32 \[7\]"),
        (lambda: kernels.add_layer_norm(torch.zeros(2, 8), torch.zeros(8, 2).T, WEIGHT, WEIGHT, 1e-6), "strides"),
        (lambda: kernels.activation(torch.zeros(2, 8), "swish"), "kind: 'swish'"),
        (lambda: kernels.activation(torch.zeros(8, 2).T, "relu"), "strides"),
        (lambda: kernels.activation(torch.zeros(2, 8), ClampedSwiGLU()), r"kind: ClampedSwiGLU\(limit=7.0"),
        (lambda: ClampedSwiGLU(0.0), r"ClampedSwiGLU takes a limit above 0; got limit: 0\.0"),
        (lambda: kernels.scale(torch.zeros(8, 2).T, 2.0), "scale takes x float32 or bfloat16, contiguous; .*strides"),
        (lambda: kernels.scale(torch.zeros(8, dtype=torch.int64), 2.0), "x: int64"),
        (lambda: kernels.clip(torch.zeros(8, 2).T, 2.0), "clip takes x float32 or bfloat16, contiguous.*strides"),
        (lambda: kernels.clip(torch.zeros(8), 0.0), r"a limit above 0; .*limit: 0\.0"),
        (lambda: kernels.softcap(torch.zeros(8).bfloat16(), 2.0), "softcap takes x float32.*x: bfloat16"),
        (lambda: kernels.softcap(torch.zeros(8, 2).T, 2.0), "strides"),
        *((lambda cap=x: kernels.softcap(torch.zeros(8), cap), f"cap from .*: {x}") for x in (0.0, 1e-40, torch.inf)),
        (lambda: kernels.gated_activation(torch.zeros(2, 7), "silu"), r"2 \* width.*got x: float32 \[2, 7\]"),
        (lambda: kernels.gated_activation(torch.zeros(2, 8), "silu", torch.zeros(2, 3)), r"out: float32 \[2, 3\]"),
        (lambda: kernels.gated_activation(torch.zeros(2, 8), "silu", torch.zeros(4, 2).T), r"out: .*strides \[1, 2\]"),
        (lambda: kernels.gated_activation(torch.zeros(2, 8), "silu", torch.zeros(2, 4).bfloat16()), "out: bfloat16"),
        (lambda: kernels.rotary_embedding(HEADS, POSITIONS.int(), COS_SIN), "positions: int32"),
        (lambda: kernels.rotary_embedding(HEADS, POSITIONS[:2], COS_SIN), r"positions: int64 \[2\]"),
        (lambda: kernels.rotary_embedding(HEADS, POSITIONS, torch.zeros(9, 10)), r"cos_sin: float32 \[9, 10\]"),
        (
            lambda: kernels.rotary_embedding(HEADS, POSITIONS + torch.tensor([0, 0, 9]), COS_SIN),
            r"position 9 is not in \[0, 9\)",
        ),
        (lambda: kernels.rotary_embedding(HEADS, POSITIONS - 1, COS_SIN), "position -1 is not in"),
        (lambda: kernels.embedding(POSITIONS.int(), COS_SIN), "token_ids: int32"),
        (lambda: kernels.embedding(POSITIONS, COS_SIN.T), "table: float32"),
        (lambda: kernels.embedding(torch.tensor([3, 9]), COS_SIN), r"token id 9 is not in \[0, 9\)"),
        (lambda: kernels.embedding(torch.tensor([-1]), kernels.pack_weight(COS_SIN)), "token id -1 is not in"),
    ],
)
def test_what_does_not_fit_is_refused(call, told):
    with pytest.raises(KernelError, match=told):
        call()


def test_positions_outside_the_table_are_refused_before_anything_is_written():
    heads = randn(3, 2, 8)
    before = heads.clone()
    with pytest.raises(KernelError):
        kernels.rotary_embedding(heads, torch.tensor([1, 2, 9]), randn(9, 8))
    assert torch.equal(heads, before)

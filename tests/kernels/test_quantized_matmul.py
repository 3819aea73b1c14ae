"""Weights of 8 and 4 bits: every variant gives the reference's very bits, whatever else is in the batch."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference, reference_rotation
from tests.effort import examples

from .isas import ISAS, needs_native, using
from .test_matmul import DTYPES, make_weight, randn

FORMATS = kernels.QUANTIZED_FORMATS
SHAPES = [(1, 1), (32, 2), (33, 7), (31, 64), (200, 129), (40, 1051)]


def quantized_product(x, weight, format, bias, out_dtype):
    """What the reference makes of x and the weight."""
    integers, scales, factors = reference.quantize_weight(weight, format)
    return reference.quantized_matmul(x, integers, scales, None, bias, out_dtype, factors)


def dequantize(packed):
    """All rows, as the embedding gives them."""
    return kernels.embedding(torch.arange(packed.n), packed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_have_the_references_bits_for_any_number_of_rows(isa, format, dtype, n, k):
    weight, bias, x = make_weight(n, k, dtype), randn(n), randn(193, k).to(dtype)
    sums = quantized_product(x, weight, format, None, torch.float32)
    with using(isa):
        packed = kernels.quantize_weight(weight, format)
        for rows in [*range(18), 24, 25, 40, 140, 193]:
            for given_bias, expected in ((None, sums), (bias, sums + bias)):
                for out_dtype in DTYPES:
                    actual = kernels.matmul(x[:rows], packed, given_bias, out_dtype)
                    assert torch.equal(actual, expected[:rows].to(out_dtype)), rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("n", "out_dtype"), [(4128, torch.bfloat16), (65584, torch.float32)])
def test_wide_results_of_few_rows_have_the_references_bits(isa, format, n, out_dtype):
    weight, bias, x = make_weight(n, 33, torch.bfloat16), randn(n), randn(12, 33).bfloat16()
    sums = quantized_product(x, weight, format, None, torch.float32)
    with using(isa):
        packed = kernels.quantize_weight(weight, format)
        for rows in (1, 4, 8, 9, 12):
            for given_bias, expected in ((None, sums), (bias, sums + bias)):
                actual = kernels.matmul(x[:rows], packed, given_bias, out_dtype)
                assert torch.equal(actual, expected[:rows].to(out_dtype)), rows


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", kernels.XIELU(0.8, 0.7), kernels.ClampedSwiGLU()])
def test_products_of_what_an_activation_makes_have_the_bits_of_both_kernels(isa, format, dtype, is_gated, kind):
    n, k = 40, 1051
    x, bias = 3 * randn(24, (1 + is_gated) * k).to(dtype), randn(n)
    activated = kernels.Activated(kind, is_gated=is_gated)
    with using(isa, num_threads=2):
        packed = kernels.quantize_weight(make_weight(n, k, dtype), format)
        if isinstance(kind, kernels.ClampedSwiGLU) and not is_gated:
            with pytest.raises(KernelError, match="ClampedSwiGLU"):
                kernels.activated_matmul(x, activated, packed, bias)
            return
        made = kernels.gated_activation(x, kind) if is_gated else kernels.activation(x, kind)
        for given_bias in (None, bias):
            expected = kernels.matmul(made, packed, given_bias)
            for rows in (0, 1, 2, 9, 24):
                assert torch.equal(kernels.activated_matmul(x[:rows], activated, packed, given_bias), expected[:rows])


@pytest.mark.parametrize(
    ("x", "is_gated", "told"),
    [
        (torch.ones(2, 64), True, r"\[2, 64\]"),
        (torch.ones(2, 128), False, r"\[2, 128\]"),
        (torch.ones(2, 64).bfloat16(), False, "bfloat16"),
        (torch.ones(64, 2).T, False, "contiguous"),
    ],
)
def test_activated_rows_that_do_not_fit_are_refused(x, is_gated, told):
    packed = kernels.quantize_weight(make_weight(3, 64, torch.float32), "int8")
    with pytest.raises(KernelError, match=told):
        kernels.activated_matmul(x, kernels.Activated("silu", is_gated=is_gated), packed)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 7, 33, 129])
def test_what_lies_in_a_workspace_does_not_leak_into_padding(isa, format, dtype, k):
    weight, x = make_weight(40, k, dtype), randn(13, k).to(dtype)
    expected = quantized_product(x, weight, format, None, torch.float32)
    backend = kernels.backend_for("cpu")
    workspace = backend.workspace()
    with using(isa), workspace.recording():
        packed = kernels.quantize_weight(weight, format)
        backend.empty((2**20,), torch.uint8).fill_(255)  # NaN, given back at once
        assert torch.equal(kernels.matmul(x, packed, None, torch.float32), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_every_variant_makes_the_references_integers_and_scales(isa, format, data):
    n, k = data.draw(st.integers(1, 70), "n"), data.draw(st.integers(1, 200), "k")
    dtype, seed = data.draw(st.sampled_from(DTYPES), "dtype"), data.draw(st.integers(0, 1000), "seed")
    weight = randn(n, k, seed=seed) * 10.0 ** data.draw(st.integers(-26, 28), "magnitude")
    for column, power in data.draw(st.dictionaries(st.integers(0, k - 1), st.integers(-6, 6)), "far columns").items():
        weight[:, column] *= 10.0**power
    weight = weight.to(dtype)
    integers, scales, factors = reference.quantize_weight(weight, format)
    with using(ISAS[-1]):
        last = kernels.quantize_weight(weight, format)
    with using(isa):
        packed = kernels.quantize_weight(weight, format)
        assert torch.equal(packed.data, last.data)
        assert packed.nbytes == kernels.quantized_bytes(n, k, format)
        expected = (integers * scales[..., None]).flatten(1)[:, :k]
        expected = (expected if factors is None else reference_rotation.rotate_back(expected, factors)).to(dtype)
        # Where the processor rounds to bfloat16, it makes denormals zero; differences of small weights may be some.
        is_denormal = (expected != 0) & (expected.abs() < torch.finfo(dtype).tiny)
        assume(dtype is torch.float32 or not is_denormal.any())
        assert torch.equal(dequantize(packed), expected)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_row_alone_has_the_bits_it_has_in_any_batch_on_any_number_of_threads(isa, format, data):
    n = data.draw(st.integers(1, 300), "n")
    k = data.draw(st.sampled_from([1, 3, 64, 515, 1024, 2500]), "k")
    rows = data.draw(st.one_of(st.integers(1, 230), st.just(1100)), "rows")
    begin = data.draw(st.integers(0, rows - 1), "begin")
    end = data.draw(st.integers(begin + 1, rows), "end")
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    x, bias = randn(rows, k).to(dtype), randn(n)
    packed = kernels.quantize_weight(make_weight(n, k, dtype), format)
    with using(isa, num_threads=data.draw(st.integers(1, 4), "threads of the batch")):
        whole = kernels.matmul(x, packed, bias, torch.float32)
    with using(isa, num_threads=data.draw(st.integers(1, 4), "threads of the part")):
        assert torch.equal(whole[begin:end], kernels.matmul(x[begin:end], packed, bias, torch.float32))
        assert torch.equal(whole[begin : begin + 1], kernels.matmul(x[begin : begin + 1], packed, bias, torch.float32))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_sums_do_not_overflow(isa, format, sign):
    weight, x = torch.ones(2, 65536), torch.ones(1, 65536) * sign
    expected = quantized_product(x, weight, format, None, torch.float32)
    with using(isa):
        actual = kernels.matmul(x, kernels.quantize_weight(weight, format))
    assert torch.equal(actual, expected)
    assert actual[0, 0].item() == pytest.approx(sign * 65536, rel=0.01)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("wrong", [torch.inf, -torch.inf, torch.nan])
def test_a_row_that_is_not_finite_gives_nans_and_its_neighbours_do_not_notice(isa, format, wrong):
    weight, x = make_weight(40, 70, torch.float32), randn(5, 70)
    with using(isa):
        packed = kernels.quantize_weight(weight, format)
        expected = kernels.matmul(x, packed)
        x[2, 50] = wrong
        actual = kernels.matmul(x, packed)
    assert actual[2].isnan().all()
    assert torch.equal(actual[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("least", [0.0, 1e-38, -1e-35])
def test_zeros_and_what_is_next_to_zero_give_zeros(isa, format, least):
    with using(isa):
        packed = kernels.quantize_weight(torch.full((3, 33), least), format)
        assert kernels.matmul(torch.ones(2, 33), packed).eq(0).all()
        packed = kernels.quantize_weight(torch.ones(3, 33), format)
        assert kernels.matmul(torch.full((2, 33), least), packed).eq(0).all()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_x_may_be_strided_and_what_follows_a_row_does_not_leak_into_it(format, dtype):
    table, wide = torch.full((40, 100), torch.nan).to(dtype), torch.full((6, 50), torch.nan).to(dtype)
    table[:, 7:40], wide[:, 3:36] = make_weight(40, 33, dtype), randn(6, 33).to(dtype)
    weight, x = table[:, 7:40], wide[:, 3:36]
    expected = quantized_product(x, weight, format, None, dtype)
    assert torch.equal(kernels.matmul(x, kernels.quantize_weight(weight, format)), expected)


@given(n=st.integers(1, 40), k=st.integers(1, 100), spread=st.floats(0.1, 4), seed=st.integers(0, 1000))
@settings(max_examples=examples(50), deadline=None)
def test_rounding_errors_are_half_a_step_of_int8_where_it_is_rotated_and_the_least_found_of_int4(n, k, spread, seed):
    weight = randn(n, k, seed=seed).sign() * randn(n, k, seed=seed + 1).abs() ** spread
    of_weight = reference_rotation.factors_of_weight(reference_rotation.factors(weight))
    rotated = reference_rotation.rotate(weight, of_weight)
    errors = reference_rotation.rotate(dequantize(kernels.quantize_weight(weight, "int8")), of_weight) - rotated
    assert (errors.abs() <= rotated.abs().amax(1, keepdim=True) / 127 * 0.501).all()
    found = torch.nn.functional.pad(dequantize(kernels.quantize_weight(weight, "int4")) - weight, (0, -k % 32))
    groups = torch.nn.functional.pad(weight, (0, -k % 32)).view(n, -1, 32)
    scale = (groups.abs().amax(2, keepdim=True) / 7).bfloat16().float()
    plain = (groups / scale.where(scale > 0, 1)).round().clamp(-8, 7) * scale - groups
    assert found.square().sum() <= plain.square().sum() * (1 + 1e-5)


def relative_error(x, weight):
    """Of the products by int8, beside the exact ones."""
    exact = x.double() @ weight.double().T
    return ((kernels.matmul(x, kernels.quantize_weight(weight, "int8")) - exact).norm() / exact.norm()).item()


@given(k=st.integers(1, 700), seed=st.integers(0, 1000))
@settings(max_examples=examples(25), deadline=None)
def test_a_rotation_keeps_products_and_turns_back(k, seed):
    x, weight = randn(3, k, seed=seed), randn(5, k, seed=seed + 1)
    weight[:, k // 2] *= 1000
    of_x = reference_rotation.factors(weight)
    rotated = reference_rotation.rotate(weight, reference_rotation.factors_of_weight(of_x))
    product = reference_rotation.rotate(x, of_x) @ rotated.T
    torch.testing.assert_close(product, x @ weight.T, rtol=1e-4, atol=1e-2)
    torch.testing.assert_close(reference_rotation.rotate_back(rotated, of_x), weight, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outliers_of_x_cost_the_others_little_of_their_precision(dtype):
    x, weight = randn(64, 896).to(dtype), randn(96, 896, seed=1).to(dtype)
    plain = relative_error(x, weight)
    for column in (5, 300, 890):
        x[:, column] *= 60
    weight[:, [5, 300, 890]] = 0  # so that exact products come from the others
    assert plain < 0.013
    assert relative_error(x, weight) < 0.05  # 0.19 without a rotation


def test_a_norms_scale_that_the_weight_takes_back_does_not_matter():
    x, weight = randn(64, 896), randn(96, 896, seed=1)
    plain = relative_error(x, weight)
    x[:, [7, 500]] *= 100
    weight[:, [7, 500]] /= 100
    assert relative_error(x, weight) < 1.05 * plain


@pytest.mark.parametrize("format", FORMATS)
def test_embedding_refuses_ids_that_are_no_rows(format):
    packed = kernels.quantize_weight(make_weight(5, 40, torch.bfloat16), format)
    assert kernels.embedding(torch.tensor([4, 0]), packed).dtype == torch.bfloat16
    with pytest.raises(KernelError, match=r"token id 5 is not in \[0, 5\)"):
        kernels.embedding(torch.tensor([0, 5]), packed)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("x", "bias", "told"),
    [
        (torch.zeros(2, 4), None, r"x \[num_tokens, 5\].*got x: float32 \[2, 4\] on cpu"),
        (torch.zeros(2, 5, dtype=torch.bfloat16), None, "bfloat16"),
        (torch.zeros(5, 2).T, None, r"strides \[1, 2\]"),
        (torch.zeros(2, 5), torch.zeros(4), r"bias: float32 \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(format, x, bias, told):
    packed = kernels.quantize_weight(torch.zeros(3, 5), format)
    with pytest.raises(KernelError, match=told):
        kernels.matmul(x, packed, bias)


@pytest.mark.parametrize(
    ("weight", "format", "told"),
    [
        (torch.zeros(3), "int8", "quantize_weight takes"),
        (torch.zeros(3, 5).T, "int8", "strides"),
        (torch.zeros(3, 5, dtype=torch.float16), "int4", "float16"),
        (torch.zeros(1, 65537), "int8", "65536"),
        (torch.zeros(3, 5), "int2", "int8 or int4.*'int2'"),
        (torch.tensor([[1.0, torch.nan]]), "int4", "finite"),
        (torch.tensor([[1.0], [torch.inf]]), "int8", "finite"),
    ],
)
def test_weights_that_cannot_be_quantized_are_refused(weight, format, told):
    with pytest.raises(KernelError, match=told):
        kernels.quantize_weight(weight, format)


@needs_native
def test_saved_bytes_are_the_weight_again_and_others_are_refused():
    packed = kernels.quantize_weight(make_weight(40, 70, torch.float32), "int4")
    again = kernels.mapped_weight(40, 70, torch.float32, "int4", packed.data)
    assert torch.equal(kernels.matmul(torch.ones(1, 70), again), kernels.matmul(torch.ones(1, 70), packed))
    with pytest.raises(KernelError, match=r"uint8 \[3456\] for \[40, 70\]"):
        kernels.mapped_weight(40, 70, torch.float32, "int4", packed.data[:-1])
    for dtype, data in ((torch.float16, packed.data), (torch.float32, packed.data[:1].expand(3456))):
        with pytest.raises(KernelError, match="mapped_weight takes contiguous data uint8"):
            kernels.mapped_weight(40, 70, dtype, "int4", data)


def test_no_weights_and_no_inputs_give_empty_and_zero_products():
    for format in FORMATS:
        assert kernels.matmul(torch.zeros(3, 4), kernels.quantize_weight(torch.zeros(0, 4), format)).shape == (3, 0)
        assert kernels.matmul(torch.zeros(3, 0), kernels.quantize_weight(torch.zeros(2, 0), format)).eq(0).all()

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference
from tests.effort import examples

from .isas import ISAS, needs_native, using
from .tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (32, 2), (33, 7), (31, 64), (200, 129), (96, 2051)]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weight(n, k, dtype):
    return (randn(n, k, seed=n * 10007 + k) / k**0.5).to(dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_the_references_for_any_number_of_rows(isa, dtype, n, k):
    weight, bias = make_weight(n, k, dtype), randn(n)
    with using(isa):
        packed = kernels.pack_weight(weight)
        for rows in [*range(18), 24, 25, 40, 193]:
            x = randn(rows, k, seed=rows).to(dtype)
            for given_bias in (None, bias):
                expected = reference.matmul(x, weight, given_bias, torch.float32)
                for out_dtype in DTYPES:
                    actual = kernels.matmul(x, packed, given_bias, out_dtype)
                    assert_close("matmul", actual, expected.to(out_dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_single_products_are_rounded_to_nearest_even_beside_nan_and_infinity(isa):
    x = (randn(40, 1, seed=1) * 2.0 ** torch.randint(-30, 120, (40, 1))).bfloat16()
    weight = randn(200, 1, seed=2).bfloat16()  # a product has 16 bits: half of them are ties or above
    weight[7], weight[70], weight[71], weight[130] = torch.nan, torch.inf, -torch.inf, 2.0**60
    with using(isa):
        actual = kernels.matmul(x, kernels.pack_weight(weight))
    expected = (x.float() * weight.float().T).bfloat16()
    assert torch.equal(actual.isnan(), expected.isnan())
    assert torch.equal(actual.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("isa", ISAS)
def test_a_nan_of_all_bits_is_rounded_to_a_nan(isa):
    x = torch.ones(3, 2)
    x[1] = torch.tensor([0x7FFFFFFF, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # rounding would overflow
    with using(isa):
        out = kernels.matmul(x, kernels.pack_weight(torch.ones(70, 2)), out_dtype=torch.bfloat16)
    assert out.isnan()[1].all()
    assert (out[::2] == 2).all()


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_row_alone_has_the_bits_it_has_in_any_batch_on_any_number_of_threads(isa, dtype, data):
    n = data.draw(st.integers(1, 300), "n")
    k = data.draw(st.sampled_from([1, 3, 64, 515, 1024, 2500]), "k")  # one and several blocks of k
    rows = data.draw(st.integers(1, 230), "rows")
    begin = data.draw(st.integers(0, rows - 1), "begin")
    end = data.draw(st.integers(begin + 1, rows), "end")
    weight, x, bias = make_weight(n, k, dtype), randn(rows, k).to(dtype), randn(n)
    with using(isa, num_threads=data.draw(st.integers(1, 4), "threads of the batch")):
        packed = kernels.pack_weight(weight)
        whole = kernels.matmul(x, packed, bias, torch.float32)
    with using(isa, num_threads=data.draw(st.integers(1, 4), "threads of the part")):
        assert torch.equal(whole[begin:end], kernels.matmul(x[begin:end], packed, bias, torch.float32))
        assert torch.equal(whole[begin : begin + 1], kernels.matmul(x[begin : begin + 1], packed, bias, torch.float32))


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", [None, "int8"])
@pytest.mark.parametrize("n", [16400, 16401])
def test_results_that_leave_the_caches_are_those_of_each_row(isa, format, n):
    """40 rows of so many columns are written past the caches where tiles multiply and rows begin at cache lines."""
    weight, x, bias = make_weight(n, 64, torch.bfloat16), randn(40, 64).bfloat16(), randn(n)
    with using(isa, num_threads=2):
        packed = kernels.pack_weight(weight) if format is None else kernels.quantize_weight(weight, format)
        for given_bias in (None, bias):
            whole = kernels.matmul(x, packed, given_bias, torch.float32)
            for row in range(0, 40, 13):
                assert torch.equal(whole[row], kernels.matmul(x[row : row + 1], packed, given_bias, torch.float32)[0])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_and_columns_of_one_task_fit_its_scratch(isa, dtype):
    """48 rows share 32 panels; 1,024 elements of each are staged at once, as float32 where pairs are not multiplied."""
    weight, x = make_weight(1024, 2051, dtype), randn(48, 2051).to(dtype)
    with using(isa, num_threads=1):
        actual = kernels.matmul(x, kernels.pack_weight(weight))
    assert_close("matmul", actual, reference.matmul(x, weight, None, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_output_has_the_dtype_of_x(dtype):
    packed = kernels.pack_weight(make_weight(5, 8, dtype))
    assert kernels.matmul(randn(2, 8).to(dtype), packed).dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_x_may_be_strided(dtype):
    weight, x = make_weight(40, 33, dtype), randn(6, 100).to(dtype)[:, 7:40]
    expected = reference.matmul(x, weight, None, dtype)
    assert_close("matmul", kernels.matmul(x, kernels.pack_weight(weight)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_follows_an_odd_row_does_not_leak_into_it(dtype):
    """The last pair of an odd row holds one element: what follows, here not a number, must not be multiplied by 0."""
    packed = kernels.pack_weight(make_weight(8, 5, dtype))
    x = torch.full((3, 6), torch.nan).to(dtype)
    x[:, :5] = 1
    assert kernels.matmul(x[:, :5], packed).isfinite().all()


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 5, 33, 1023, 2051])
def test_what_earlier_products_left_in_memory_does_not_leak_into_an_odd_row(isa, dtype, k):
    """A product of NaNs fills the scratch memory with them. Padding of odd rows must be written before it is read."""
    poison, weight = torch.full((192, 1031), torch.nan), make_weight(256, k, dtype)
    poisonous = torch.full((256, 1031), torch.nan)
    with using(isa, num_threads=1):
        packed, packed_poison = kernels.pack_weight(weight), kernels.pack_weight(poisonous)
        for rows in (1, 7, 13, 100):
            x = randn(rows, k, seed=rows).to(dtype)
            assert kernels.matmul(poison, packed_poison).isnan().all()
            assert_close("matmul", kernels.matmul(x, packed), reference.matmul(x, weight, None, dtype))


@given(
    n=st.integers(1, 200),
    k=st.integers(1, 700),
    dtype=st.sampled_from(DTYPES),
    offset=st.integers(0, 3),
    gap=st.integers(0, 3),
)
@settings(max_examples=examples(60), deadline=None)
def test_packing_is_undone_by_unpacking_whatever_the_alignment_and_stride(n, k, dtype, offset, gap):
    size = dtype.itemsize
    raw = torch.randint(0, 256, (offset + n * (k + gap) * size,), dtype=torch.uint8)
    table = torch.frombuffer(memoryview(raw.numpy())[offset:], dtype=dtype).view(n, k + gap)  # as in a mapped file
    weight = table[:, :k]
    packed = kernels.pack_weight(weight)
    assert (packed.n, packed.k, packed.dtype) == (n, k, dtype)
    assert torch.equal(kernels.unpack_weight(packed).view(torch.uint8), weight.contiguous().view(torch.uint8))


@needs_native
def test_packed_weights_fill_whole_panels():
    assert kernels.pack_weight(torch.zeros(33, 5)).nbytes == 64 * 5 * 4
    assert kernels.pack_weight(torch.zeros(33, 5, dtype=torch.bfloat16)).nbytes == 64 * 6 * 2


def test_no_weights_and_no_inputs_give_empty_and_zero_products():
    assert kernels.matmul(torch.zeros(3, 4), kernels.pack_weight(torch.zeros(0, 4))).shape == (3, 0)
    assert kernels.matmul(torch.zeros(3, 0), kernels.pack_weight(torch.zeros(2, 0))).eq(0).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_products_are_written_to_columns_of_a_wider_result(isa, format):
    weight = make_weight(70, 64, torch.float32)
    with using(isa):
        packed = kernels.pack_weight(weight) if format is None else kernels.quantize_weight(weight, format)
        for rows, dtype in [(1, torch.float32), (5, torch.bfloat16), (40, torch.float32)]:
            x, whole = randn(rows, 64, seed=rows), torch.full((rows, 99), 7.0, dtype=dtype)
            out = kernels.matmul(x, packed, randn(70), out=whole[:, 16:86])
            assert torch.equal(out, kernels.matmul(x, packed, randn(70), dtype))
            assert torch.equal(out, whole[:, 16:86])
            assert whole[:, :16].eq(7).all()
            assert whole[:, 86:].eq(7).all()


@pytest.mark.parametrize(
    ("out", "told"),
    [
        (torch.zeros(2, 4), r"out \[num_tokens, 3\].*out: float32 \[2, 4\]"),
        (torch.zeros(3, 2).T, r"out: float32 \[2, 3\] strides \[1, 2\]"),
        (torch.zeros(2, 3, device="meta"), r"out: float32 \[2, 3\] on meta"),
        (torch.zeros(2, 3).half(), r"out_dtype: torch\.float16, out: float16"),
    ],
)
def test_a_place_that_does_not_fit_is_refused(out, told):
    with pytest.raises(KernelError, match=told):
        kernels.matmul(torch.zeros(2, 5), kernels.pack_weight(torch.zeros(3, 5)), out=out)
    with pytest.raises(KernelError, match=r"out_dtype: torch\.bfloat16, out: float32"):
        kernels.matmul(torch.zeros(2, 5), kernels.pack_weight(torch.zeros(3, 5)), None, torch.bfloat16, out=out.float())


@pytest.mark.parametrize(
    ("x", "bias", "out_dtype", "told"),
    [
        (torch.zeros(2, 4), None, None, r"x \[num_tokens, 5\].*got x: float32 \[2, 4\] on cpu"),
        (torch.zeros(5), None, None, r"float32 \[5\]"),
        (torch.zeros(2, 5, dtype=torch.bfloat16), None, None, "bfloat16"),
        (torch.zeros(5, 2).T, None, None, r"strides \[1, 2\]"),
        (torch.zeros(2, 5, device="meta"), None, None, "meta"),
        (torch.zeros(2, 5), torch.zeros(4), None, r"bias: float32 \[4\]"),
        (torch.zeros(2, 5), torch.zeros(3, dtype=torch.bfloat16), None, "bias: bfloat16"),
        (torch.zeros(2, 5), None, torch.float16, "out_dtype: torch.float16"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(x, bias, out_dtype, told):
    packed = kernels.pack_weight(torch.zeros(3, 5))
    with pytest.raises(KernelError, match=told):
        kernels.matmul(x, packed, bias, out_dtype)


@pytest.mark.parametrize("weight", [torch.zeros(3), torch.zeros(3, 5).T, torch.zeros(3, 5, dtype=torch.float16)])
def test_weights_that_cannot_be_packed_are_refused(weight):
    with pytest.raises(KernelError, match="pack_weight takes"):
        kernels.pack_weight(weight)


@pytest.mark.parametrize(
    "others", [[], [torch.ones(2, 4), torch.ones(2, 8)], [torch.ones(2, 4), torch.ones(2, 4).bfloat16()]]
)
def test_parts_that_cannot_be_stacked_are_refused(others):
    with pytest.raises(KernelError, match=r"StackedWeight takes parts .*at least one"):
        kernels.StackedWeight(tuple(kernels.pack_weight(other) for other in others))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_head_meets_its_own_matrix_in_float32(isa, dtype):
    heads = torch.randn(3, 20, 16).to(dtype)
    x = torch.randn(7, 5, 16).to(dtype)[:, 1:4]
    with using(isa):
        packed = [kernels.pack_weight(head) for head in heads]
        out = kernels.matmul_heads(x, packed)
        expected = torch.einsum("thk,hnk->thn", x.float(), heads.float())
        assert out.dtype is torch.float32
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
        for head in range(3):
            assert torch.equal(out[:, head], kernels.matmul(x[:, head], packed[head], None, torch.float32))
        for wrong in (x[:, :2], x[:, :, :8], x[0], x.double(), x.transpose(1, 2)):
            with pytest.raises(KernelError, match="matmul_heads"):
                kernels.matmul_heads(wrong, packed)
        with pytest.raises(KernelError, match="matmul_heads"):
            kernels.matmul_heads(x, [*packed[:2], kernels.pack_weight(heads[0][:8])])
        quantized = kernels.quantize_weight(heads[0].float(), "int8")
        for others in ([], [quantized] * 3, [kernels.pack_weight(heads[0].to("meta"))] * 3):
            with pytest.raises(KernelError, match="matmul_heads"):
                kernels.matmul_heads(x, others)


def test_an_activation_is_multiplied_by_quantized_weights_alone():
    packed = kernels.pack_weight(torch.zeros(3, 8))
    with pytest.raises(KernelError, match=r"activated_matmul takes .* a quantized weight"):
        kernels.activated_matmul(torch.zeros(2, 8), kernels.Activated("relu", is_gated=False), packed)

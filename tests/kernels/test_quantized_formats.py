"""Weights that other tools quantized: kept to the bit, and multiplied by with the reference's bits by every variant."""

from itertools import product

import pytest
import torch

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference, reference_blocks

from .isas import ISAS, needs_native, using
from .test_matmul import DTYPES, randn


def random_blocks(format: str, n: int, num_blocks: int) -> torch.Tensor:
    """Rows of blocks [n, bytes] of random bits, but for their float16 numbers: an exponent that is no infinity."""
    _, size = kernels.block_size(format)
    generator = torch.Generator().manual_seed(len(format) + n)
    blocks = torch.randint(0, 256, (n, num_blocks, size), dtype=torch.uint8, generator=generator)
    if format != "mxfp4":
        for at in {"q2_k": (81, 83), "q3_k": (109,), "q6_k": (209,)}.get(format, (1, 3)):
            blocks[:, :, at] = blocks[:, :, at] & 0xBF  # the highest bit of the exponent
    else:
        blocks[:, :, 0] = blocks[:, :, 0] % 20 + 118
    return blocks.flatten(1)


def in_bytes(integers, bits=4):
    return [kernels.PlacedIntegers.in_bytes(integers, bits)]


def all_rows(weight):
    return kernels.embedding(torch.arange(weight.n), weight)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", kernels.BLOCK_FORMATS)
@pytest.mark.parametrize(("n", "num_blocks"), [(1, 1), (33, 3), (70, 7)])
def test_blocks_are_kept_to_the_bit_and_products_have_the_references_bits(isa, format, n, num_blocks):
    rows = random_blocks(format, n, num_blocks)
    k = num_blocks * kernels.block_size(format)[0]
    integers, scales, mins = reference_blocks.split(rows, format)
    numbers = integers * scales[..., None]
    numbers = (numbers if mins is None else numbers - mins[..., None]).flatten(1)
    x = randn(29, k)
    expected = reference.quantized_matmul(x, integers, scales, mins, None, torch.float32)
    with using(isa):
        weight = kernels.pack_blocks(rows, k, torch.float32, format)
        assert weight.nbytes == kernels.quantized_bytes(n, k, format)
        assert torch.equal(all_rows(weight), numbers)
        for count in (1, 2, 5, 12, 29):
            assert torch.equal(kernels.matmul(x[:count], weight), expected[:count]), count
    with using(ISAS[-1]):
        assert torch.equal(kernels.pack_blocks(rows, k, torch.float32, format).data, weight.data)


INTEGERS = {"q2_k": slice(16, 80), "q3_k": slice(96), "q4_k": slice(16, None), "q5_k": slice(16, None)}
INTEGERS |= {"q6_k": slice(192), "q4_1": slice(4, None), "q5_1": slice(4, None), "iq4_xs": slice(8, None)}
INTEGERS |= {"mxfp4": slice(1, None)}  # the others: behind two bytes


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", kernels.BLOCK_FORMATS)
@pytest.mark.parametrize("byte", [0x00, 0x7F, 0x80, 0xFF])
def test_the_greatest_products_fit_the_sums(isa, format, byte):
    elements, size = kernels.block_size(format)
    blocks = random_blocks(format, 33, 3).view(33, 3, size)
    blocks[:, :, INTEGERS.get(format, slice(2, None))] = byte
    x = torch.ones(9, 3 * elements)
    x[1:3], x[3, ::2], x[4, 1::2], x[5, 2::4] = -1, -1, -1, -1
    expected = reference.quantized_matmul(x, *reference_blocks.split(blocks.flatten(1), format), None, torch.float32)
    with using(isa):
        weight = kernels.pack_blocks(blocks.flatten(1), 3 * elements, torch.float32, format)
        for count in (1, 6, 9):
            assert torch.equal(kernels.matmul(x[:count], weight), expected[:count])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "scale_range"),
    [(1, 32, 32), (40, 200, 64), (33, 1300, 128), (7, 77, 77), (65, 1280, 128), (40, 768, 384), (33, 256, 1024)],
)
def test_integers_and_zeros_are_kept_and_products_have_the_references_bits(
    isa, bits, scale_dtype, has_zeros, n, k, scale_range
):
    ranges, generator = -(-k // scale_range), torch.Generator().manual_seed(k)
    integers = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator)
    scales = randn(n, ranges).to(scale_dtype)
    zeros = torch.randint(0, 2**bits, (n, ranges), dtype=torch.uint8, generator=generator) if has_zeros else None
    parts = reference.split_integers(integers, scales, zeros, bits, scale_range)
    x = randn(25, k)
    expected = reference.quantized_matmul(x, *parts, None, torch.float32)
    of_k = torch.arange(k) // scale_range
    offsets = zeros[:, of_k].float() if has_zeros else torch.tensor(float(2 ** (bits - 1)))
    with using(isa):
        weight = kernels.pack_integers(in_bytes(integers, bits), scales, zeros, torch.float32, scale_range)
        if scale_dtype != torch.float32:  # exact: a product of few bits
            assert torch.equal(all_rows(weight), (integers - offsets) * scales.float()[:, of_k])
        for count in (1, 4, 11, 25):
            assert torch.equal(kernels.matmul(x[:count], weight), expected[:count]), count


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("integer", [0, 15])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_the_greatest_products_of_long_groups_fit_the_sums(isa, integer, has_zeros):
    integers, scales = torch.full((33, 640), integer, dtype=torch.uint8), torch.ones(33, 5)
    zeros = torch.full((33, 5), 15 - integer, dtype=torch.uint8) if has_zeros else None
    x = torch.ones(14, 640)
    x[1:3], x[3, ::2], x[4, 1::2], x[5, 2::4] = -1, -1, -1, -1
    parts = reference.split_integers(integers, scales, zeros, 4, 128)
    assert parts[0].shape == (33, 5, 128)
    expected = reference.quantized_matmul(x, *parts, None, torch.float32)
    with using(isa):
        weight = kernels.pack_integers(in_bytes(integers, 4), scales, zeros, torch.float32, 128)
        for count in (1, 6, 14):
            assert torch.equal(kernels.matmul(x[:count], weight), expected[:count])


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_mxfp4_of_two_tensors_is_that_of_blocks(isa):
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 16, (40, 96), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(0, 255, (40, 3), dtype=torch.uint8, generator=generator)
    halves = integers.view(40, 3, 2, 16)
    blocks = torch.cat([exponents[..., None], halves[:, :, 0] | halves[:, :, 1] << 4], 2).flatten(1)
    with using(isa):
        one = kernels.pack_integers(in_bytes(integers), exponents, None, torch.bfloat16, 32)
        other = kernels.pack_blocks(blocks, 96, torch.bfloat16, "mxfp4")
    assert torch.equal(one.data, other.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_the_reference_backend_are_near(dtype):
    weight = kernels.pack_blocks(random_blocks("q4_0", 20, 4), 128, dtype, "q4_0")
    x = randn(3, 128).to(dtype)
    exact = x.float() @ all_rows(weight).float().T
    assert (kernels.matmul(x, weight, None, torch.float32) - exact).abs().max() <= 0.02 * exact.abs().max()


@pytest.mark.parametrize(
    ("rows", "k", "format", "told"),
    [
        (torch.zeros(3, 18, dtype=torch.uint8), 33, "q4_0", r"got rows: uint8 \[3, 18\]"),
        (torch.zeros(3, 17, dtype=torch.uint8), 32, "q4_0", "pack_blocks takes"),
        (torch.zeros(3, 18), 32, "q4_0", "float32"),
        (torch.zeros(36, 3, dtype=torch.uint8).T, 64, "q4_0", "strides"),
        (torch.zeros(3, 18, dtype=torch.uint8), 32, "q9_9", "q9_9"),
    ],
)
def test_rows_that_are_no_blocks_are_refused(rows, k, format, told):
    with pytest.raises(KernelError, match=told):
        kernels.pack_blocks(rows, k, torch.float32, format)


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": -1},
        {"n": 2**62},
        {"k": -1},
        {"k": 65537},
        {"k": 2**62},
        {"format": "nonsense"},
        {"format": "u4_half"},
        {"format": "u8_float_zeros", "scale_range": -32},
    ],
)
def test_sizes_that_no_weight_has_are_refused(wrong):
    given = {"n": 4, "k": 64, "format": "int8"} | wrong
    with pytest.raises(KernelError, match=r"quantized_bytes takes .*format"):
        kernels.quantized_bytes(**given)
    given.pop("scale_range", None)
    with pytest.raises(KernelError, match=r"mapped_weight takes .*format"):
        kernels.mapped_weight(**given, dtype=torch.float32, data=torch.zeros(64, dtype=torch.uint8))


def test_formats_without_blocks_are_refused():
    with pytest.raises(KernelError, match=r"block_size takes .*q4_0.*got format: 'int8'"):
        kernels.block_size("int8")


def placed(rows, columns=torch.arange(64) * 4):  # noqa: B008
    """Integers of 64 columns beside each other, in 192 bytes."""
    return [kernels.PlacedIntegers(torch.zeros(192, dtype=torch.uint8), 4, torch.as_tensor(rows), columns)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"parts": in_bytes(torch.zeros(3, 64, dtype=torch.uint8), bits=5)},
        {"parts": in_bytes(torch.zeros(3, 64, dtype=torch.uint8)) + in_bytes(torch.zeros(3, 64, dtype=torch.uint8), 8)},
        {"parts": placed([0, 256, 513])},
        {"parts": placed([0, 256, 1288])},
        {"parts": placed([0, 256, -4])},
        {"parts": placed([0, 2**62, 4], torch.cat([torch.arange(63) * 4, torch.tensor([2**62])]))},
        {"parts": []},
        {"parts": placed(torch.tensor([0, 256, 512]).int())},
        {"parts": placed(torch.tensor(0).expand(3))},
        {"parts": placed(torch.tensor([[0, 256, 512]]))},
        {"parts": placed(torch.zeros(3, dtype=torch.int64, device="meta"))},
        {"parts": placed([0, 256, 512], torch.arange(64).int() * 4)},
        {"parts": placed([0, 256, 512], (torch.arange(128) * 2)[::2])},
        {"scales": torch.zeros(3, 3)},
        {"scales": torch.zeros(3, 2, dtype=torch.float64)},
        {"zeros": torch.zeros(3, 1, dtype=torch.uint8)},
        {"scale_range": 16},
        {"scale_range": 0},
    ],
)
def test_integers_and_scales_that_do_not_fit_are_refused(wrong):
    given = {"parts": placed([0, 256, 1280]), "scales": torch.zeros(3, 2), "zeros": None}
    given |= {"dtype": torch.float32, "scale_range": 32}
    assert kernels.pack_integers(**given).n == 3
    with pytest.raises(KernelError, match="pack_integers takes"):
        kernels.pack_integers(**(given | wrong))


@pytest.mark.parametrize("scale_range", [96, 2**31, 2**40, 2**70])
def test_a_scale_range_beyond_the_columns_is_one_of_all_columns(scale_range):
    integers = torch.randint(0, 256, (3, 80), dtype=torch.uint8)
    given = in_bytes(integers, 8), torch.rand(3, 1), None, torch.float32
    x = torch.randn(2, 80)
    products = [kernels.matmul(x, kernels.pack_integers(*given, each)) for each in (80, scale_range)]
    assert torch.equal(*products)
    sizes = {kernels.quantized_bytes(3, 80, "u8_float", each) for each in (96, scale_range)}
    assert len(sizes) == 1


@pytest.mark.parametrize("isa", ISAS)
def test_the_columns_of_x_may_be_read_in_another_order(isa):
    generator = torch.Generator().manual_seed(3)
    integers = torch.randint(0, 16, (40, 200), dtype=torch.uint8, generator=generator)
    scales, order = randn(40, 4).half(), torch.randperm(200, generator=generator).int()
    x = randn(9, 200)
    with using(isa):
        weight = kernels.pack_integers(in_bytes(integers), scales, None, torch.float32, 64, order)
        sorted_weight = kernels.pack_integers(in_bytes(integers), scales, None, torch.float32, 64)
        assert torch.equal(kernels.matmul(x, weight), kernels.matmul(x[:, order.long()].contiguous(), sorted_weight))


@pytest.mark.parametrize("order", [torch.zeros(64).int(), torch.arange(64), torch.arange(1, 65).int()])
def test_an_order_must_have_each_column_once(order):
    with pytest.raises(KernelError, match="each column once"):
        kernels.pack_integers(placed([0, 4, 8]), torch.zeros(3, 2), None, torch.float32, 32, order)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", [(40, 3, 5, 50), (64, 32), (1, 30, 2)])
def test_modules_with_integers_in_any_places_are_stacked(isa, bits, sizes):
    generator, k = torch.Generator().manual_seed(len(sizes)), 300
    integers = torch.randint(0, 2**bits, (sum(sizes), k), dtype=torch.uint8, generator=generator)
    scales, parts = randn(len(integers), 3).half(), []
    for i, rows in enumerate(integers.split(sizes)):
        n, order = len(rows), torch.randperm(k, generator=generator)
        shuffled = torch.empty_like(rows)
        shuffled[:, order] = rows
        packed = shuffled.T if i % 2 else shuffled
        if bits == 4:  # two in each byte, behind the tensor's first byte
            packed = torch.cat([packed.new_zeros(2), packed.flatten(), packed.new_zeros(packed.numel() % 2)])
            packed = packed[::2] | packed[1::2] << 4
        steps = (bits, n * bits) if i % 2 else (k * bits, bits)
        places, columns = torch.arange(n) * steps[0] + (8 if bits == 4 else 0), torch.arange(k) * steps[1]
        part = kernels.PlacedIntegers(packed.contiguous(), bits, places, columns)
        parts.append(part.in_order(order))
    with using(isa):
        weight = kernels.pack_integers(parts, scales, None, torch.float32, 128)
        plain = kernels.pack_integers(in_bytes(integers, bits), scales, None, torch.float32, 128)
        assert torch.equal(all_rows(weight), all_rows(plain))
        assert torch.equal(weight.data, plain.data)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("format", kernels.BLOCK_FORMATS)
def test_scales_and_minimums_that_are_not_finite_are_refused(isa, format):
    elements, _ = kernels.block_size(format)
    is_byte = format == "mxfp4"
    starts = (
        (0,)
        if is_byte
        else {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,)}.get(
            format, (0, 2) if format in reference_blocks.WITH_MINS else (0,)
        )
    )
    for start, value in product(starts, (255,) if is_byte else (0x7C, 0xFE)):
        rows = random_blocks(format, 40, 3)
        rows.view(40, 3, -1)[37, 2, start if is_byte else start + 1] = value
        with using(isa), pytest.raises(KernelError, match="scales are not finite"):
            kernels.pack_blocks(rows, 3 * elements, torch.float32, format)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.uint8])
def test_scales_of_integers_that_are_not_finite_are_refused(isa, dtype):
    scales = torch.ones(3, 2).to(dtype)
    scales[2, 1] = 255 if dtype is torch.uint8 else -torch.inf
    with using(isa), pytest.raises(KernelError, match="scales are not finite"):
        kernels.pack_integers(placed([0, 256, 512]), scales, None, torch.float32, 32)

"""Weights that other tools quantized: kept to the bit, and multiplied by with the reference's bits by every variant."""

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


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scale_dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("n", "k", "scale_range"), [(1, 32, 32), (40, 200, 64), (33, 1300, 128), (7, 77, 77)])
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
        weight = kernels.pack_integers(integers, scales, zeros, torch.float32, bits, scale_range)
        if scale_dtype != torch.float32:  # exact: a product of few bits
            assert torch.equal(all_rows(weight), (integers - offsets) * scales.float()[:, of_k])
        for count in (1, 4, 25):
            assert torch.equal(kernels.matmul(x[:count], weight), expected[:count]), count


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_mxfp4_of_two_tensors_is_that_of_blocks(isa):
    generator = torch.Generator().manual_seed(1)
    integers = torch.randint(0, 16, (40, 96), dtype=torch.uint8, generator=generator)
    exponents = torch.randint(0, 255, (40, 3), dtype=torch.uint8, generator=generator)
    halves = integers.view(40, 3, 2, 16)
    blocks = torch.cat([exponents[..., None], halves[:, :, 0] | halves[:, :, 1] << 4], 2).flatten(1)
    with using(isa):
        one = kernels.pack_integers(integers, exponents, None, torch.bfloat16, 4, 32)
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
        {"integers": torch.zeros(3, 64)},
        {"integers": torch.zeros(192, dtype=torch.uint8)},
        {"scales": torch.zeros(3, 3)},
        {"scales": torch.zeros(3, 2, dtype=torch.float64)},
        {"zeros": torch.zeros(3, 1, dtype=torch.uint8)},
        {"bits": 5},
        {"scale_range": 16},
        {"scale_range": 0},
    ],
)
def test_integers_and_scales_that_do_not_fit_are_refused(wrong):
    given = {"integers": torch.zeros(3, 64, dtype=torch.uint8), "scales": torch.zeros(3, 2), "zeros": None}
    given |= {"dtype": torch.float32, "bits": 4, "scale_range": 32}
    assert kernels.pack_integers(**given).n == 3
    with pytest.raises(KernelError, match="pack_integers takes"):
        kernels.pack_integers(**(given | wrong))


@pytest.mark.parametrize("isa", ISAS)
def test_the_columns_of_x_may_be_read_in_another_order(isa):
    generator = torch.Generator().manual_seed(3)
    integers = torch.randint(0, 16, (40, 200), dtype=torch.uint8, generator=generator)
    scales, order = randn(40, 4).half(), torch.randperm(200, generator=generator).int()
    x = randn(9, 200)
    with using(isa):
        weight = kernels.pack_integers(integers, scales, None, torch.float32, 4, 64, order)
        sorted_weight = kernels.pack_integers(integers, scales, None, torch.float32, 4, 64)
        assert torch.equal(kernels.matmul(x, weight), kernels.matmul(x[:, order.long()].contiguous(), sorted_weight))


@pytest.mark.parametrize("order", [torch.zeros(64).int(), torch.arange(64), torch.arange(1, 65).int()])
def test_an_order_must_have_each_column_once(order):
    with pytest.raises(KernelError, match="each column once"):
        kernels.pack_integers(
            torch.zeros(3, 64, dtype=torch.uint8), torch.zeros(3, 2), None, torch.float32, 4, 32, order
        )

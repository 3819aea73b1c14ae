"""GGUF's block types: reference_blocks against the `gguf` package, bit by bit."""

import gguf
import numpy as np
import pytest
import torch

from quire.common.errors import KernelError
from quire.kernels.backends import reference_blocks
from quire.kernels.backends.reference_blocks import BLOCKS, GROUPS, WITH_MINS

_HALVES = {"q2_k": (80, 82), "q3_k": (108,), "q6_k": (208,), "mxfp4": ()}
"""Where a block's float16 numbers begin; at 0, and for types with minimums also at 2, if not listed."""


def random_blocks(name: str, rows: int, blocks: int) -> np.ndarray:
    """Rows of random bytes, [rows, row_bytes] uint8, whose scales are finite."""
    kind = BLOCKS[name]
    rng = np.random.default_rng(sorted(BLOCKS).index(name))
    data = rng.integers(0, 256, (rows * blocks, kind.num_bytes), dtype=np.uint8)
    for start in _HALVES.get(name, (0, 2) if name in WITH_MINS else (0,)):
        halves = rng.normal(size=(rows * blocks, 1)).astype(np.float16)
        halves[:3, 0] = (-0.0, 6e-8, 65504)  # a zero, a subnormal number, the largest
        data[:, start : start + 2] = halves.view(np.uint8)
    if name == "mxfp4":
        data[:, 0] %= 252  # the largest exponents overflow
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", BLOCKS)
def test_every_weight_has_the_bits_that_gguf_gives_it(name: str) -> None:
    data = random_blocks(name, rows=7, blocks=300)
    expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name.upper()])
    integers, scales, mins = reference_blocks.split(torch.from_numpy(data), name)
    weights = integers * scales[..., None]
    if mins is not None:
        weights = weights - mins[..., None]
    assert weights.dtype is torch.float32
    assert np.array_equal(weights.flatten(1).numpy().view(np.int32), expected.view(np.int32))
    expanded = reference_blocks.expand(torch.from_numpy(data), name)
    assert np.array_equal(expanded.numpy().view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("name", BLOCKS)
def test_sizes_are_those_of_gguf(name: str) -> None:
    kind = BLOCKS[name]
    assert (kind.elements, kind.num_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name.upper()]]
    integers, scales, mins = reference_blocks.split(torch.from_numpy(random_blocks(name, 2, 3)), name)
    assert integers.dtype is torch.int16
    assert integers.shape == (2, 3 * kind.elements // kind.group, kind.group)
    assert scales.shape == integers.shape[:2]
    assert GROUPS[name] == kind.group
    assert (mins is not None) == (name in WITH_MINS)


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(KernelError, match=r"multiple of 144"):
        reference_blocks.split(torch.zeros(1, 145, dtype=torch.uint8), "q4_k")

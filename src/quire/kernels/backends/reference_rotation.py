"""The definition, in plain torch, of the rotation of rows before they are quantized.

A row keeps its length, and its products with other rows that are rotated alike, but no column is far larger than the
others any more, whose precision that would cost (Ashkboos et al. 2024, QuaRot). Rows are cut into blocks of 256, 64,
16, 4 and 1 columns, as many of the longest as there are; each is multiplied with Hadamard's matrix of its size.
"""

import torch
from torch import Tensor

_WIDTHS = (256, 64, 16, 4, 1)
"""Powers of four: their roots are powers of two, so that to multiply with those is exact."""
_SMALL, _LARGE = 8.0, 32.0
"""A column is compensated whose largest magnitude is this many times less, or more, than the median of all columns'."""
_MOST_EXPONENT = 32


def blocks(k: int) -> list[int]:
    """The widths of a row's blocks."""
    widths: list[int] = []
    for width in _WIDTHS:
        widths += [width] * ((k - sum(widths)) // width)
    return widths


def roots(k: int) -> Tensor:
    """[k]: for each column, the square root of the width of its block."""
    return torch.tensor([float(width) for width in blocks(k) for _ in range(width)]).sqrt()


def factors(weight: Tensor) -> Tensor:
    """What x's columns are multiplied with before x is rotated, to be multiplied by weight [n, k]: [k] float32.

    A sign from the mixed bits of the column's index, so that rows of ordinary numbers are unlike those of Hadamard's
    matrix; over the root of the block's width, so that lengths stay; times the power of two next to the ratio between
    the column's largest magnitude and the median of all columns', where they are far apart. x is as much larger there,
    as a rule: the weights of a norm may have been scaled up, and those behind it down, without another result.
    """
    plain = _signs(weight.shape[1]) / roots(weight.shape[1])
    if weight.numel() == 0:
        return plain
    largest = weight.float().abs().amax(0)
    ratio = largest / largest.median()
    fraction, exponent = torch.frexp(ratio)
    power = torch.where(fraction < 0.70710678, exponent - 1, exponent).clamp(-_MOST_EXPONENT, _MOST_EXPONENT)
    is_far = (ratio > 0) & ratio.isfinite() & ((ratio >= _LARGE) | (ratio <= 1 / _SMALL))
    return plain * torch.where(is_far, torch.ldexp(torch.ones_like(ratio), power), 1.0)


def factors_of_weight(factors: Tensor) -> Tensor:
    """What the weight's columns are multiplied with, for these factors of x: [k] float32."""
    return 1 / (factors * roots(len(factors)).square())


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """x [rows, k] times factors [k], rotated: [rows, k] float32. Sums are made in the order of the strides."""
    parts = []
    for block in torch.split(x.float() * factors, blocks(x.shape[1]), dim=1):
        stride, width = 1, block.shape[1]
        while stride < width:
            pairs = block.reshape(len(x), width // (2 * stride), 2, stride)
            block = torch.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], 2)
            stride *= 2
        parts.append(block.reshape(len(x), width))
    return torch.cat(parts, 1)


def rotate_back(rotated: Tensor, factors: Tensor) -> Tensor:
    """Rows of a weight from its rotated ones, [rows, k] float32; `factors` are those of x."""
    return rotate(rotated, torch.ones_like(factors)) * factors


def _signs(k: int) -> Tensor:
    mask = 0xFFFFFFFF
    bits = torch.arange(k, dtype=torch.int64) * 0x9E3779B1 & mask
    bits = (bits ^ bits >> 15) * 0x85EBCA6B & mask
    return 1.0 - 2.0 * ((bits ^ bits >> 13) & 1)

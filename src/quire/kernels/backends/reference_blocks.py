"""The definition, in plain torch, of the weights in each block type of GGUF files.

A row of a matrix is cut into blocks of 32 or 256 weights; a block is integers and the scales they share. The names and
layouts are those of ggml (https://github.com/ggml-org/ggml, `ggml-common.h`); MXFP4 is that of the OCP Microscaling
Formats, version 1.0. `split` is lossless: every weight is `integer * scale - minimum` in float32.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.common.errors import KernelError

_Parts = tuple[Tensor, Tensor, Tensor | None]
"""Of n blocks: integers [n, groups, group] int16, scales [n, groups] and minimums [n, groups] float32, or None."""

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@dataclass(frozen=True, slots=True)
class BlockType:
    """How one type stores a block."""

    elements: int
    """Weights in a block."""
    num_bytes: int
    """Bytes of a block."""
    group: int
    """Weights that share a scale."""
    split: Callable[[Tensor], _Parts]
    """From blocks [n, num_bytes] uint8 to their parts."""


def split(data: Tensor, block_type: str) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split rows of blocks, data [n, row_bytes] uint8, into integers, scales and minimums.

    Returns int16 [n, groups, group], float32 [n, groups], and float32 [n, groups] or None for a type without minimums.
    Raises KernelError if the rows are not whole blocks. `block_type` is a key of BLOCKS.
    """
    kind = BLOCKS[block_type]
    if data.dtype is not torch.uint8 or data.dim() != 2 or data.shape[1] % kind.num_bytes:
        raise KernelError(
            f"split takes rows of {block_type} blocks, uint8 [n, multiple of {kind.num_bytes}], not "
            f"{data.dtype} {list(data.shape)}"
        )
    n, row_bytes = data.shape
    groups = row_bytes // kind.num_bytes * (kind.elements // kind.group)
    integers, scales, mins = kind.split(data.reshape(-1, kind.num_bytes))
    return (
        integers.to(torch.int16).reshape(n, groups, kind.group),
        scales.reshape(n, groups),
        None if mins is None else mins.reshape(n, groups),
    )


def expand(data: Tensor, block_type: str) -> Tensor:
    """Rows of blocks [n, row_bytes] uint8 as the weights they stand for, [n, k] float32."""
    integers, scales, mins = split(data, block_type)
    weights = integers * scales[..., None]
    return (weights if mins is None else weights - mins[..., None]).flatten(1)


def _halves(data: Tensor) -> Tensor:
    """Bytes [n, 2 * count] as float16, made float32: [n, count]."""
    return data.contiguous().view(torch.float16).float()


def _fields(data: Tensor, width: int, chunk: int) -> Tensor:
    """The `width`-bit fields of bytes [n, b]: of each `chunk` bytes first all lowest fields, then the next higher ones.

    Returns uint8 [n, b * 8 / width].
    """
    shifts = torch.arange(8 // width, dtype=torch.uint8)[:, None] * width
    fields = data.reshape(len(data), -1, 1, chunk) >> shifts & (1 << width) - 1
    return fields.flatten(1)


def _high_bits(data: Tensor) -> Tensor:
    """The 32 bits of a little-endian word, data [n, 4], lowest first: uint8 [n, 32]."""
    return (data[:, :, None] >> torch.arange(8, dtype=torch.uint8) & 1).flatten(1)


def _q4_0(data: Tensor) -> _Parts:
    return _fields(data[:, 2:], 4, 16).short() - 8, _halves(data[:, :2]), None


def _q4_1(data: Tensor) -> _Parts:
    return _fields(data[:, 4:], 4, 16), _halves(data[:, :2]), -_halves(data[:, 2:4])


def _q5_0(data: Tensor) -> _Parts:
    integers = _fields(data[:, 6:], 4, 16) | _high_bits(data[:, 2:6]) << 4
    return integers.short() - 16, _halves(data[:, :2]), None


def _q5_1(data: Tensor) -> _Parts:
    integers = _fields(data[:, 8:], 4, 16) | _high_bits(data[:, 4:8]) << 4
    return integers, _halves(data[:, :2]), -_halves(data[:, 2:4])


def _q8_0(data: Tensor) -> _Parts:
    return data[:, 2:].contiguous().view(torch.int8), _halves(data[:, :2]), None


def _q2_k(data: Tensor) -> _Parts:
    """Sixteen groups of 16, whose scale and minimum are 4-bit multiples of the block's."""
    multiples, quants, halves = data[:, :16], data[:, 16:80], _halves(data[:, 80:84])
    scales, mins = halves[:, :1] * (multiples & 15), halves[:, 1:] * (multiples >> 4)
    return _fields(quants, 2, 32), scales, mins


def _q3_k(data: Tensor) -> _Parts:
    """Sixteen groups of 16, whose scale is a 6-bit multiple of the block's. A cleared high bit means minus four."""
    high, quants, packed, block = data[:, :32], data[:, 32:96], data[:, 96:108], _halves(data[:, 108:])
    multiples = _fields(packed[:, :8], 4, 8) | _fields(packed[:, 8:], 2, 4) << 4
    integers = _fields(quants, 2, 32).short() - (_fields(high, 1, 32) ^ 1).short() * 4
    return integers, block * (multiples.short() - 32), None


def _multiples_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight scales and the eight minimums in 12 bytes: uint8 [n, 8] each."""
    scales, mins, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    return (
        torch.cat([scales & 63, rest & 15 | scales >> 2 & 48], 1),
        torch.cat([mins & 63, rest >> 4 | mins >> 2 & 48], 1),
    )


def _q4_k(data: Tensor) -> _Parts:
    """Eight groups of 32, whose scale and minimum are 6-bit multiples of the block's."""
    halves, (scales, mins) = _halves(data[:, :4]), _multiples_of_6_bits(data[:, 4:16])
    return _fields(data[:, 16:], 4, 32), halves[:, :1] * scales, halves[:, 1:] * mins


def _q5_k(data: Tensor) -> _Parts:
    """As _q4_k, with a fifth bit."""
    halves, (scales, mins) = _halves(data[:, :4]), _multiples_of_6_bits(data[:, 4:16])
    integers = _fields(data[:, 48:], 4, 32) | _fields(data[:, 16:48], 1, 32) << 4
    return integers, halves[:, :1] * scales, halves[:, 1:] * mins


def _q6_k(data: Tensor) -> _Parts:
    """Sixteen groups of 16, whose scale is an 8-bit multiple of the block's."""
    integers = _fields(data[:, :128], 4, 64) | _fields(data[:, 128:192], 2, 32) << 4
    multiples = data[:, 192:208].contiguous().view(torch.int8)
    return integers.short() - 32, _halves(data[:, 208:]) * multiples, None


def _from_table(values: tuple[int, ...], indices: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.int16)[indices.int()]


def doubled_float4(bits: Tensor) -> Tensor:
    """Twice the numbers E2M1 of MXFP4, which makes them integers: int16."""
    return _from_table(_E2M1_DOUBLED, bits)


def _iq4_nl(data: Tensor) -> _Parts:
    return _from_table(_IQ4, _fields(data[:, 2:], 4, 16)), _halves(data[:, :2]), None


def _iq4_xs(data: Tensor) -> _Parts:
    """Eight groups of 32, whose scale is a 6-bit multiple of the block's."""
    low, high = _fields(data[:, 4:8], 4, 1), _fields(data[:, 2:4], 2, 1)
    scales = _halves(data[:, :2]) * ((low | high << 4).short() - 32)
    return _from_table(_IQ4, _fields(data[:, 8:], 4, 16)), scales, None


def _mxfp4(data: Tensor) -> _Parts:
    """A scale of eight exponent bits: half of 2^(e - 127), since the table holds doubled values."""
    exponent = data[:, :1].int()
    bits = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    return doubled_float4(_fields(data[:, 1:], 4, 16)), bits.view(torch.float32), None


BLOCKS: dict[str, BlockType] = {
    "q4_0": BlockType(32, 18, 32, _q4_0),
    "q4_1": BlockType(32, 20, 32, _q4_1),
    "q5_0": BlockType(32, 22, 32, _q5_0),
    "q5_1": BlockType(32, 24, 32, _q5_1),
    "q8_0": BlockType(32, 34, 32, _q8_0),
    "q2_k": BlockType(256, 84, 16, _q2_k),
    "q3_k": BlockType(256, 110, 16, _q3_k),
    "q4_k": BlockType(256, 144, 32, _q4_k),
    "q5_k": BlockType(256, 176, 32, _q5_k),
    "q6_k": BlockType(256, 210, 16, _q6_k),
    "iq4_nl": BlockType(32, 18, 32, _iq4_nl),
    "iq4_xs": BlockType(256, 136, 32, _iq4_xs),
    "mxfp4": BlockType(32, 17, 32, _mxfp4),
}
"""By ggml's name of the type, in lower case."""
GROUPS: dict[str, int] = {name: kind.group for name, kind in BLOCKS.items()}
"""Weights that share a scale: 16 or 32."""
WITH_MINS: frozenset[str] = frozenset({"q4_1", "q5_1", "q2_k", "q4_k", "q5_k"})
"""The types that subtract a minimum."""

"""Checkpoints that keep what all experts of a layer have in one tensor, seen as if each expert had its own."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np

from quire.common.errors import CheckpointError
from quire.config.checkpoint.tensors import Checkpoint, TensorInfo
from quire.kernels.experts.weights import MAX_EXPERTS


@dataclass(frozen=True, slots=True)
class Stack:
    """Tensors that hold a matrix (or a bias, or blocks and scales) for each expert, one below the other."""

    pattern: str
    """A regular expression for their names in the checkpoint."""
    names: tuple[str, ...]
    """What the match is replaced with, for each tensor that an expert's rows are dealt to; `{}` is the expert. None:
    these tensors are left out."""
    is_interleaved: bool = False
    """Whether names take rows in turn, and not one range each."""
    is_transposed: bool = False
    """Whether the expert's matrix is stored as [k, n]."""
    num_experts: int | None = None
    """For tensors that have no dimension of experts: how many share the first one."""


STACKS = (
    Stack(r"\.experts\.gate_up_proj$", (".experts.{}.gate_proj.weight", ".experts.{}.up_proj.weight")),
    Stack(r"\.experts\.down_proj$", (".experts.{}.down_proj.weight",)),
)
"""As transformers keeps experts."""
MODULE_STACKS = (Stack(r"\.experts\.(gate|up|down)_proj\.(weight|bias)$", (r".experts.{}.\1_proj.\2",)),)
"""As GGUF files do, whatever the architecture."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where a tensor of one expert is."""

    source: str
    rows: tuple[int, int]
    """The expert's range of the source's first dimension."""
    shape: tuple[int, ...]
    """The shape of the expert's matrix there."""
    is_transposed: bool
    index: slice
    """The rows of the matrix, as it is meant, that are this tensor's."""


class UnstackedCheckpoint:
    """A Checkpoint in which each expert's part of a stacked tensor is a tensor; others are as they are."""

    def __init__(self, checkpoint: Checkpoint, stacks: Sequence[Stack]) -> None:
        """Raises CheckpointError for a stacked tensor whose shape does not fit its Stack."""
        self._checkpoint = checkpoint
        self._slices: dict[str, _Slice] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, info in checkpoint.tensors.items():
            stack = next((stack for stack in stacks if re.search(stack.pattern, name)), None)
            if stack is None or stack.names:
                tensors |= {name: info} if stack is None else self._cut(stack, name, info)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _cut(self, stack: Stack, source: str, info: TensorInfo) -> dict[str, TensorInfo]:
        """The tensors of each expert."""
        num_rows = info.shape[0] if info.shape else 0
        num_experts, parts = stack.num_experts or num_rows, len(stack.names)
        each = num_rows // num_experts if num_rows else 0
        shape = info.shape[1:] if stack.num_experts is None else (each, *info.shape[1:])
        meant = shape[::-1] if stack.is_transposed else shape
        if (
            not 0 < num_experts <= MAX_EXPERTS
            or num_rows != num_experts * each
            or not shape
            or (stack.is_transposed and (len(shape) != 2 or info.block_type is not None))
            or meant[0] % parts
        ):
            raise CheckpointError(
                f"{source} {list(info.shape)} does not hold the matrices of experts, at most {MAX_EXPERTS}, whose "
                f"rows can be dealt to {parts}"
            )
        size = meant[0] // parts
        block_shape = None if info.block_shape is None else (size, info.block_shape[-1])
        num_bytes = info.num_bytes // (num_experts * parts)
        found = {}
        for expert, (i, replacement) in product(range(num_experts), enumerate(stack.names)):
            name = re.sub(stack.pattern, replacement.replace("{}", str(expert)), source)
            index = slice(i, None, parts) if stack.is_interleaved else slice(i * size, (i + 1) * size)
            rows = (expert * each, (expert + 1) * each)
            self._slices[name] = _Slice(source, rows, shape, stack.is_transposed, index)
            found[name] = TensorInfo(
                name, info.dtype, (size, *meant[1:]), num_bytes, block_type=info.block_type, block_shape=block_shape
            )
        return found

    @contextmanager
    def reading(self, name: str, rows: tuple[int, int] | None = None) -> Iterator[memoryview]:
        """As Checkpoint. Rows that are no neighbours in the file are copied."""
        part = self._slices.get(name)
        if part is None:
            with self._checkpoint.reading(name, rows) as data:
                yield data
            return
        with self._checkpoint.reading(part.source, part.rows) as data:
            item_bytes = len(data) // max(1, math.prod(part.shape))
            if part.is_transposed:
                matrix = np.frombuffer(data, dtype=f"u{item_bytes}").reshape(part.shape).T
            else:
                matrix = np.frombuffer(data, dtype=np.uint8).reshape(part.shape[0], -1)
            chosen = matrix[part.index] if rows is None else matrix[part.index][slice(*rows)]
            yield memoryview(np.ascontiguousarray(chosen).reshape(-1).view(np.uint8).data)

"""Parts of a forward pass in several processes, put together again: what each rank computed, and its rows of matrices.

The kernels are native only (csrc/ranks): the reference computes in one process.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.common.errors import ConfigError
from quire.config.parallel import Range, Shard
from quire.kernels.backends import backend_for, backend_of
from quire.kernels.backends.native.arguments import DTYPE_CODES, FORMAT_CODES, activation_code
from quire.kernels.backends.native.backend import NativeBackend
from quire.kernels.checks import KERNEL_ERRORS, refusal
from quire.kernels.experts.weights import ExpertRows
from quire.kernels.variants import ActivationKind
from quire.kernels.weights import Matrix, PackedWeight, QuantizedWeight, StackedWeight


class Ranks:
    """The processes that compute a forward pass together, of which this is one.

    All of them call the same kernels in the same order, on rows of the same number. A rank that waits for another one
    raises RuntimeError when the group is stopped, or when the other one makes no progress for `patience_s`.
    """

    def __init__(self, shard: Shard, group: Any = None, shared: Tensor | None = None) -> None:
        """Without a native group there are only shapes, on the meta device, for planning."""
        self.shard = shard
        self.group = group
        self.shared = shared
        """Memory [num_bytes] uint8 of all ranks, where each may write its part of what all read; mapped as long as the
        group lives."""

    @classmethod
    def join(
        cls,
        shard: Shard,
        file: int,
        slot_bytes: int,
        patience_s: float = 0.0,
        *,
        own: Range | None = None,
        sockets: Sequence[int] = (),
    ) -> "Ranks":
        """Join the group whose memory is the file of this descriptor. `patience_s` 0: wait for ever. `own`: the ranks
        of this machine, if there are others, to which the `sockets` lead its first rank (csrc/ranks/wire.h)."""
        first, end = own or (0, shard.num_ranks)
        given = file, shard.rank, shard.num_ranks, slot_bytes, round(10 * patience_s), first, end - first
        group, start = native_kernels().RankGroup(*given, list(sockets)), _shared_from(shard.num_ranks, slot_bytes)
        return cls(shard, group, _shared_memory(group, start) if group.size > start else None)

    def have_all(self, logits: Tensor) -> bool:
        """Whether these are what `Gather.placed` returned in all ranks."""
        return self.shared is not None and logits.data_ptr() == self.shared.data_ptr()

    def begin(self) -> None:
        """Another pass begins: a rank that is still in the one before raises an error instead of mixing both."""
        self.group.begin()

    def stop(self) -> None:
        """Let all ranks raise an error instead of waiting."""
        self.group.stop()

    def restart(self) -> None:
        """Begin anew after `stop`; rank 0 once no rank is in a kernel, and all before the next one."""
        self.group.restart()


def native_backend() -> NativeBackend:
    """The backend of the native kernels. Raises ConfigError if they are not in use."""
    backend = backend_for("cpu")
    if not isinstance(backend, NativeBackend):
        raise ConfigError("tensor_parallel_size requires the native kernels, which are not in use")
    return backend


def native_kernels() -> Any:
    """As `native_backend`: quire._native."""
    return native_backend().native


def rank_memory_bytes(num_ranks: int, slot_bytes: int, shared_bytes: int = 0) -> int:
    """The size of the file that `Ranks.join` takes, which must hold zeros. If all ranks are on one machine, they may
    have `shared_bytes` more, to compute the first one's logits in."""
    return _shared_from(num_ranks, slot_bytes) + shared_bytes


def _shared_from(num_ranks: int, slot_bytes: int) -> int:
    """Where in the file the memory begins that is not slots: at the next page."""
    num_bytes = int(native_kernels().rank_memory_bytes(num_ranks, slot_bytes))
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _shared_memory(group: Any, start: int) -> Tensor:
    """The tensor does not keep the group alive, which has the memory mapped."""
    memory = (ctypes.c_char * (group.size - start)).from_address(group.memory + start)
    return torch.frombuffer(memory, dtype=torch.uint8)


class Gather:
    """Puts the columns of all ranks side by side."""

    def __init__(self, ranks: Ranks, sizes: Sequence[int], *, first_only: bool = False) -> None:
        """`sizes`: the columns of each rank. With `first_only`, the others keep only what they have."""
        self._ranks, self._shard, self._sizes, self._first_only = ranks, ranks.shard, tuple(sizes), first_only
        self._bounds = {item: np.cumsum([0, *sizes]) * item for item in (2, 4)}
        """Where the parts begin, in bytes, by the size of an element. Recordings read them, so they stay in place."""
        self._nothing = np.zeros(len(sizes) + 1, np.int64)
        """As these, for a meeting of the ranks that moves nothing."""

    def __call__(self, x: Tensor) -> Tensor:
        """x [num_rows, own columns] contiguous -> [num_rows, all columns], with the same bits."""
        own, width, backend = self._sizes[self._shard.rank], sum(self._sizes), backend_of(x)
        if x.dim() != 2 or x.shape[1] != own or not x.is_contiguous():
            raise refusal("gather", f"contiguous x [num_rows, {own}]", x=x)
        out = x if self._first_only and self._shard.rank > 0 else backend.empty((len(x), width), x.dtype)
        if self._ranks.group is not None:
            self._move(x, len(x), self._bounds[x.element_size()], out, first_only=self._first_only)
        return out

    def place(self, num_rows: int, dtype: torch.dtype = torch.float32, *, waits: bool = True) -> Tensor | None:
        """Where this rank may write its part of a result [num_rows, own columns], in memory of all ranks, so that
        nothing is copied. None if there is none of that size. It `waits` until all ranks come here; it need not where
        the ranks have gathered something else since all of them have read what was placed before."""
        whole = self._whole(num_rows, dtype)
        if whole is None:
            return None
        if waits:
            self._move(whole, 1, self._nothing, whole)
        start, end = self._shard.range_of(self._sizes)
        return whole[:, start:end]

    def placed(self, num_rows: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """What all ranks have written to their places [num_rows, all columns], in each of them, until a next call of
        `place` in any Gather."""
        whole = self._whole(num_rows, dtype)
        assert whole is not None
        self._move(whole, 1, self._nothing, whole)
        return whole

    def _whole(self, num_rows: int, dtype: torch.dtype) -> Tensor | None:
        width, shared = sum(self._sizes), self._ranks.shared
        num_bytes = dtype.itemsize * num_rows * width
        if shared is None or num_bytes > shared.nbytes:
            return None
        return shared[:num_bytes].view(dtype).view(num_rows, width)

    def _move(self, x: Tensor, num_rows: int, bounds: np.ndarray, out: Tensor, *, first_only: bool = False) -> None:
        given = self._ranks.group.address, x.data_ptr(), num_rows, bounds.ctypes.data, out.data_ptr()
        with KERNEL_ERRORS:
            native_kernels().gather_parts(*given, sum(self._sizes) * x.element_size(), first_only)


class GatherRows:
    """Gives all ranks the rows of all experts, of which each has computed those of its own."""

    def __init__(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """`sizes`: the experts of each rank. Recordings read their bounds, so these stay in place."""
        self._ranks, self._bounds = ranks, np.cumsum([0, *sizes])

    def gated_activation(self, x: Tensor, own: ExpertRows, kind: ActivationKind) -> Tensor:
        """As kernels.gated_activation, of this rank's rows alone; the others of the result are undefined."""
        backend, width = backend_of(x), x.shape[1] // 2
        if self._ranks.group is None:
            return backend.gated_activation(x, kind)
        out = backend.empty((len(x), width), x.dtype)
        given = DTYPE_CODES[x.dtype], *activation_code(kind), x.data_ptr(), own.starts.data_ptr(), len(own.starts) - 1
        native_kernels().gated_expert_rows(*given, width, out.data_ptr())
        return out

    def __call__(self, y: Tensor, rows: ExpertRows) -> Tensor:
        """y [num_pairs, width] contiguous, in the order of `rows`; what the others have computed is written to it."""
        if self._ranks.group is not None:
            given = self._ranks.group.address, y.data_ptr(), y.shape[1] * y.element_size()
            with KERNEL_ERRORS:
                native_kernels().gather_expert_rows(*given, rows.starts.data_ptr(), self._bounds.ctypes.data)
        return y


class SharedTable:
    """Looks up rows of a table that the ranks have divided among them."""

    def __init__(self, ranks: Ranks, sizes: Sequence[int]) -> None:
        """`sizes`: the rows of each rank."""
        self._ranks, self._shard, self._bounds = ranks, ranks.shard, np.cumsum([0, *sizes])

    def __call__(self, ids: Tensor, table: PackedWeight | QuantizedWeight) -> Tensor:
        """ids [num_tokens] int64 of the whole table, `table` being this rank's rows -> [num_tokens, k]. Raises
        KernelError for an id that the table does not have."""
        backend = backend_of(ids)
        look_up: Callable[[Tensor, Any], Tensor] = (
            backend.gather_packed if isinstance(table, PackedWeight) else backend.gather_quantized
        )
        if self._ranks.group is None:
            return look_up(ids, table)
        native, own = native_kernels(), backend.empty(ids.shape, torch.int64)
        first, rows = int(self._bounds[self._shard.rank]), len(ids)
        with KERNEL_ERRORS:
            native.own_rows(ids.data_ptr(), rows, int(self._bounds[-1]), first, table.n, own.data_ptr())
            found = look_up(own, table)
            out = backend.empty(found.shape, found.dtype)
            given = self._ranks.group.address, found.data_ptr(), rows, found.shape[1] * found.element_size()
            native.select_rows(*given, ids.data_ptr(), self._bounds.ctypes.data, out.data_ptr())
        return out


def take_rows(matrix: Matrix, ranges: Sequence[Range]) -> Matrix:
    """Some rows of a matrix in the kernels' layout, one range below the other, in memory of their own."""
    if isinstance(matrix, StackedWeight):
        parts, start = [], 0
        for part in matrix.parts:
            inside = [(max(a, start) - start, min(b, start + part.n) - start) for a, b in ranges]
            wanted = [(a, b) for a, b in inside if a < b]
            parts += [_rows_of(part, wanted)] if wanted else []
            start += part.n
        return StackedWeight(tuple(parts))
    return _rows_of(matrix, ranges)


def _rows_of(matrix: PackedWeight | QuantizedWeight, ranges: Sequence[Range]) -> PackedWeight | QuantizedWeight:
    rows = np.concatenate([np.arange(*each) for each in ranges])
    if matrix.data.is_meta:
        return replace(matrix, n=len(rows))
    backend = native_backend()
    native, count, k, at = backend.native, len(rows), matrix.k, rows.ctypes.data
    if isinstance(matrix, PackedWeight):
        size = matrix.dtype.itemsize
        data = backend.weight_memory(native.packed_bytes(count, k, size))
        native.take_packed_rows(matrix.address, k, size, at, count, data.data_ptr())
    else:
        data = backend.weight_memory(backend.quantized_bytes(count, k, matrix.format, matrix.scale_range))
        codes = FORMAT_CODES[matrix.format], matrix.scale_range
        native.take_quantized_rows(*codes, matrix.n, k, matrix.address, at, count, data.data_ptr())
    return replace(matrix, n=count, data=data, address=data.data_ptr())

"""The errors that kernels raise, and what all their wrappers check."""

from collections.abc import Callable

import torch
from torch import Tensor

from quire.common import liveness
from quire.common.errors import KernelError

DTYPES = (torch.float32, torch.bfloat16)
"""The dtypes that kernels compute with. A dtype's index here is its number in csrc/base/common.h."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "quick_gelu")
"""The kinds of activation without parameters. A kind's index here is its number in csrc/base/kernel_table.h."""


POOLINGS = ("mean", "sum_by_root", "weighted_mean", "max")
"""The ways of pooling rows. A way's index here is its number in csrc/base/kernel_table.h."""
_FLOAT32 = torch.finfo(torch.float32)


def describe(value: object) -> str:
    """Shape, strides, dtype and device of a tensor; the repr of anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    layout = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{dtype} {list(value.shape)}{layout} on {value.device}"


def refusal(kernel: str, expected: str, **given: object) -> KernelError:
    """The error to raise. It says what `kernel` takes, and what each of its arguments was."""
    got = ", ".join(f"{name}: {describe(value)}" for name, value in given.items())
    return KernelError(f"{kernel} takes {expected}; got {got}")


def is_count(value: object, least: int) -> bool:
    """Whether it is an integer of at least `least` that kernels can take, as an int64."""
    return isinstance(value, int) and least <= value < 2**63


def is_cap(value: float) -> bool:
    """Whether float32 has all digits of a soft cap above 0, and room for its product with log2(e)."""
    return _FLOAT32.tiny <= value <= _FLOAT32.max / 2


def is_whole(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, holds: Callable[[Tensor], bool]) -> bool:
    """Whether it is contiguous, of this shape and dtype, and on the device of a backend (`Backend.holds`)."""
    return tensor.shape == shape and tensor.dtype is dtype and tensor.is_contiguous() and holds(tensor)


def are_numbers(
    holds: Callable[[Tensor], bool], shape: tuple[int, ...], first: Tensor | None, second: Tensor | None = None
) -> bool:
    """Whether each is None, or whole, of this shape and float32: weight and bias, sinks and slopes."""
    return (first is None or is_whole(first, shape, torch.float32, holds)) and (
        second is None or is_whole(second, shape, torch.float32, holds)
    )


def are_ids(holds: Callable[[Tensor], bool], ids: Tensor, dim: int = 1) -> bool:
    """Whether these are int64, contiguous, of this number of dimensions, and on the device of a backend."""
    return ids.dtype is torch.int64 and ids.dim() == dim and ids.is_contiguous() and holds(ids)


def is_place(out: Tensor, num_rows: int, width: int, dtype: torch.dtype, holds: Callable[[Tensor], bool]) -> bool:
    """Whether it has room for a result [num_rows, width] of this dtype, whose rows may lie apart, where a backend has
    its tensors."""
    is_row_whole = out.is_contiguous() or out.stride(1) == 1
    return out.shape == (num_rows, width) and is_row_whole and out.dtype is dtype and holds(out)


class _KernelErrors:
    """A class, since contextlib's generators cost as much as a small kernel."""

    def __enter__(self) -> None:
        liveness.num_kernel_events += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        liveness.num_kernel_events += 1
        if error is not None and isinstance(error, ValueError):
            raise KernelError(str(error)) from None


KERNEL_ERRORS = _KernelErrors()
"""A context in which a backend's ValueErrors, for values out of range, become KernelErrors.

Entering and leaving it counts as a sign of life: kernels that take long or are called in every layer run in it.
"""


def check_range(what: str, ids: Tensor, limit: int, first: int = 0) -> None:
    """Raise KernelError unless all ids are in [first, limit). The native kernels check this themselves."""
    for bad in ids[(ids < first) | (ids >= limit)][:1].tolist():
        raise KernelError(f"{what} {bad} is not in [{first}, {limit})")

"""What the kernel wrappers say when they are called with something the native kernels do not take."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from quire.errors import KernelError


def describe(value: object) -> str:
    """Shape, strides, dtype and device of a tensor; the repr of anything else."""
    if not isinstance(value, Tensor):
        return repr(value)
    dtype = str(value.dtype).removeprefix("torch.")
    layout = "" if value.is_contiguous() else f" strides {list(value.stride())}"
    return f"{dtype} {list(value.shape)}{layout} on {value.device}"


def refusal(kernel: str, expected: str, **given: object) -> KernelError:
    """The error to raise: what `kernel` takes, and what each of its arguments was."""
    got = ", ".join(f"{name}: {describe(value)}" for name, value in given.items())
    return KernelError(f"{kernel} takes {expected}; got {got}")


@contextmanager
def native_errors() -> Iterator[None]:
    """Turn what a native kernel refuses (values out of range) into a KernelError."""
    try:
        yield
    except ValueError as error:
        raise KernelError(str(error)) from None

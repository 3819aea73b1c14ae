"""What the kernel wrappers say when they are called with something the native kernels do not take."""

from torch import Tensor

from quire.common import liveness
from quire.common.errors import KernelError


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


class _NativeErrors:
    """A class, since contextlib's generators cost as much as a small kernel."""

    def __enter__(self) -> None:
        liveness.num_kernel_events += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        liveness.num_kernel_events += 1
        if isinstance(error, ValueError):
            raise KernelError(str(error)) from None


_NATIVE_ERRORS = _NativeErrors()


def native_errors() -> _NativeErrors:
    """A context that turns what a native kernel refuses (values out of range) into a KernelError. It counts as a sign
    of life: what takes long, or is called in every layer, runs in it."""
    return _NATIVE_ERRORS


def check_range(what: str, ids: Tensor, limit: int) -> None:
    """What the native kernels check themselves, for the reference."""
    for bad in ids[(ids < 0) | (ids >= limit)][:1].tolist():
        raise KernelError(f"{what} {bad} is not in [0, {limit})")

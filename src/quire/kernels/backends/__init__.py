"""The backend of each device. The CPU's is the native extension in one of its ISA variants, or the torch reference."""

import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.common import errors, faults
from quire.config.parallel import check_threads
from quire.kernels.backends.base import Backend
from quire.kernels.backends.native.backend import NativeBackend
from quire.kernels.backends.reference_backend import ReferenceBackend
from quire.kernels.backends.shapes import ShapesBackend

ISAS = (
    *("portable", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx"),
    *("neon", "neon_dot", "neon_i8mm", "sve256", "reference"),
)


def choose_cpu_backend(wanted: str | None) -> Backend:
    """The native kernels, set to the ISA variant `wanted` (None or empty: the best of this CPU), or the reference."""
    if wanted and wanted not in ISAS:
        raise errors.ConfigError(
            f"QUIRE_ISA={wanted} is not one of {', '.join(ISAS)}{errors.nearest_name(wanted.lower(), ISAS)}"
        )
    native = None if wanted == "reference" else _import_native()
    if native is None:
        return ReferenceBackend("cpu")
    if wanted and not native.use_isa(wanted):
        raise errors.ConfigError(
            f"QUIRE_ISA={wanted} cannot run here; this CPU has {', '.join(native.available_isas())}"
        )
    faults.arm_native(native.refuse_memory)
    return NativeBackend(native)


def _import_native() -> Any:
    """The extension, or None after a warning."""
    try:
        return importlib.import_module("quire._native")
    except ImportError as error:
        warnings.warn(
            f"QUIRE IS RUNNING WITHOUT ITS NATIVE KERNELS, many times slower than it should and without bitwise "
            f"reproducible batches: {error}. Install it again where there is a C++20 compiler, or set "
            "QUIRE_ISA=reference to accept this.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


class _Backends(dict[str, Backend]):
    """By device. What is registered for a type of device serves each device of that type."""

    def __missing__(self, device: str) -> Backend:
        backend = self.get(device.partition(":")[0])
        if backend is None:
            raise errors.KernelError(
                f"there are no kernels for tensors on {device}, only for those on {', '.join(self)}"
            )
        self[device] = backend
        return backend


_backends = _Backends()


def register_backend(device: str, backend: Backend) -> None:
    """Let `backend` serve the tensors on a device, such as `cuda:1`, or on all devices of a type, such as `cuda`."""
    _backends[str(torch.device(device))] = backend


def backend_for(device: str) -> Backend:
    """The backend of a device. Raises KernelError if it has none."""
    return _backends[device]


def backend_of(tensor: Tensor) -> Backend:
    """The backend of a tensor's device. Raises KernelError if it has none."""
    return _backends["cpu" if tensor.is_cpu else str(tensor.device)]  # to name a device takes as long as a small kernel


register_backend("cpu", choose_cpu_backend(os.environ.get("QUIRE_ISA")))
register_backend("meta", ShapesBackend(backend_for("cpu")))


def isa() -> str:
    """The variant of the CPU's kernels: amx, avx512_bf16, avx512_vnni, avx512, avx_vnni, avx2, sve256, neon_i8mm,
    neon_dot, neon, portable or reference."""
    return backend_for("cpu").isa


def num_threads() -> int:
    """Threads that the CPU's kernels run on, when this thread calls them."""
    return backend_for("cpu").num_threads()


def set_num_threads(count: int, cpus: Sequence[int] = ()) -> None:
    """Set the default threads of the CPU's kernels, which all callers share that have none of their own.

    There are `count` of them, each pinned to one of `cpus`, or not pinned without. The thread that calls a kernel takes
    part in the place of the first CPU's; it is never pinned. An engine with `num_threads` or `cpu_list` has threads of
    its own, which this does not change.
    """
    check_threads(count, cpus)
    backend_for("cpu").set_num_threads(count, cpus)

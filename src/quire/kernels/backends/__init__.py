"""Which kernels serve: the native extension in one of its ISA variants, or the torch reference."""

import importlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from quire.common import errors, faults

ISAS = ("portable", "avx2", "avx512", "avx512_bf16", "reference")

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}
"""the element types of the native kernels, by their number in csrc/common.h"""


def _load_native(wanted: str | None) -> Any:
    """The extension, set to the ISA variant `wanted` (None: the best of this CPU), or None to use the reference."""
    if wanted is not None and wanted not in ISAS:
        raise errors.ConfigError(
            f"QUIRE_ISA={wanted} is not one of {', '.join(ISAS)}{errors.nearest_name(wanted, ISAS)}"
        )
    if wanted == "reference":
        return None
    try:
        module: Any = importlib.import_module("quire._native")
    except ImportError as error:
        warnings.warn(
            f"QUIRE IS RUNNING WITHOUT ITS NATIVE KERNELS, many times slower than it should and without bitwise "
            f"reproducible batches: {error}. Install it again where there is a C++20 compiler, or set "
            "QUIRE_ISA=reference to accept this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    if wanted is not None and not module.use_isa(wanted):
        raise errors.ConfigError(
            f"QUIRE_ISA={wanted} cannot run here; this CPU has {', '.join(module.available_isas())}"
        )
    faults.arm_native(module.refuse_memory)
    return module


native: Any = _load_native(os.environ.get("QUIRE_ISA"))
"""quire._native, or None where the reference serves. Untyped: only the kernel wrappers call it, after checking."""


def isa() -> str:
    """The variant in use: avx512_bf16, avx512, avx2, portable or reference."""
    return "reference" if native is None else str(native.isa())


def num_threads() -> int:
    """Threads the kernels run on."""
    return torch.get_num_threads() if native is None else int(native.num_threads())


def set_num_threads(count: int, cpus: Sequence[int] = ()) -> None:
    """Run kernels on `count` threads from now on: each pinned to one of as many `cpus`, or, without, not pinned.

    The thread that calls a kernel takes part in the place of the first CPU's; it is never pinned.
    """
    if count < 1:
        raise errors.ConfigError(f"num_threads is {count}; it must be at least 1")
    if native is not None:
        native.set_num_threads(count, cpus)
    elif cpus:
        raise errors.ConfigError("only the native kernels' threads can be pinned to CPUs: install Quire with them")
    else:
        torch.set_num_threads(count)

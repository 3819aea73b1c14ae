"""Low-rank adapters (LoRA, Hu et al. 2021) of some rows of a batch, added to the outputs of a projection."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.checks import DTYPES, KERNEL_ERRORS, refusal
from quire.kernels.weights import MAX_LORA_MODULES, Factors, LoRATable, LoRAWeight


def pack_lora(
    factors: Sequence[Factors | None], sizes: Sequence[int], k: int, dtype: torch.dtype, memory: Tensor | None = None
) -> LoRAWeight:
    """Convert the factors of the modules that a projection fuses, None where a module has none, to `dtype`.

    Module m has k inputs and `sizes[m]` outputs. There are at most three, and the factors are of any floating dtype.
    The result may lie at the start of `memory`, contiguous uint8 that is aligned to 64 bytes and long enough.
    """
    if (
        not 0 < len(sizes) == len(factors) <= MAX_LORA_MODULES
        or dtype not in DTYPES
        or not any(factors)
        or not all(pair is None or _is_pair(pair, n, k) for pair, n in zip(factors, sizes, strict=True))
    ):
        shapes = [pair and (list(pair[0].shape), list(pair[1].shape)) for pair in factors]
        takes = f"one to {MAX_LORA_MODULES} pairs of A [rank, {k}] and B [n, rank] for n of {list(sizes)}, or None"
        raise refusal("pack_lora", f"{takes}, and float32 or bfloat16", shapes=shapes, dtype=dtype)
    device = next(pair for pair in factors if pair is not None)[0]
    return backend_of(device).pack_lora(factors, tuple(sizes), k, dtype, memory)


def _is_pair(pair: Factors, n: int, k: int) -> bool:
    a, b = pair
    floating = a.is_floating_point() and b.is_floating_point()
    return floating and a.dim() == b.dim() == 2 and len(a) > 0 and a.shape[1] == k and b.shape == (n, len(a))


def add_lora(x: Tensor, out: Tensor, adapters: LoRATable, slots: Tensor) -> None:
    """`out[i] += B (A x[i])` in place, by the adapter in slot `slots[i]`; rows of slot -1 keep their bits.

    x [num_tokens, k] and out [num_tokens, n] are contiguous and have the table's dtype; slots [num_tokens] int64 is
    contiguous. So do rows whose slot holds nothing for this projection. A x and the sums are float32.
    """
    rows, table = len(slots), adapters
    if (
        x.shape != (rows, table.k)
        or out.shape != (rows, sum(table.sizes))
        or not x.dtype == out.dtype == table.dtype
        or slots.dtype is not torch.int64
        or slots.dim() != 1
        or not (x.is_contiguous() and out.is_contiguous() and slots.is_contiguous())
        or not x.device == out.device == slots.device
    ):
        dtype = str(table.dtype).removeprefix("torch.")
        takes = (
            f"x [num_tokens, {table.k}] and out [num_tokens, {sum(table.sizes)}] {dtype} for these adapters, and slots "
            "[num_tokens] int64, contiguous and on one device"
        )
        raise refusal("add_lora", takes, x=x, out=out, slots=slots)
    with KERNEL_ERRORS:
        backend_of(x).add_lora(x, out, adapters, slots)

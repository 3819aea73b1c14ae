"""Drawing the next token of each row of logits."""

import torch
from torch import Tensor

from quire.errors import KernelError
from quire.kernels import reference
from quire.kernels.backend import native
from quire.kernels.checks import native_errors, refusal


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> Tensor:
    """One token id per row of logits [num_rows, vocab] float32 -> [num_rows] int64, as reference.sample.

    temperature (0: greedy), top_p and uniform float32 or float64 and top_k integer (0: all), each [num_rows]. NaN
    logits count as -inf; a row of nothing else gives id 0. A row gives the same token on every instruction set.
    """
    num_rows = logits.shape[0] if logits.dim() else 0
    per_row = (temperature, top_k, top_p, uniform)
    taken = (
        logits.dim() == 2
        and logits.is_cpu
        and logits.dtype is torch.float32
        and logits.shape[1] > 0
        and (logits.stride(1) == 1 or logits.is_contiguous())
        and all(t.is_cpu and t.shape == (num_rows,) for t in per_row)
        and all(t.dtype in (torch.float32, torch.float64) for t in (temperature, top_p, uniform))
        and top_k.dtype in (torch.int32, torch.int64)
    )
    if not taken:
        raise refusal(
            "sample", _TAKES, logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, uniform=uniform
        )
    temperature, top_p, uniform = (t.to(torch.float64).contiguous() for t in (temperature, top_p, uniform))
    top_k = top_k.to(torch.int64).contiguous()
    if native is None:
        _check_ranges(temperature, top_k, top_p, uniform)
        return reference.sample(logits, temperature, top_k, top_p, uniform)
    out = torch.empty(num_rows, dtype=torch.int64)
    with native_errors():
        native.sample(
            logits.data_ptr(),
            logits.stride(0),
            num_rows,
            logits.shape[1],
            temperature.data_ptr(),
            top_k.data_ptr(),
            top_p.data_ptr(),
            uniform.data_ptr(),
            out.data_ptr(),
        )
    return out


def _check_ranges(temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor) -> None:
    """What the native kernel checks itself, for the reference."""
    allowed = {
        "temperature": (temperature, temperature >= 0),
        "top_k": (top_k, top_k >= 0),
        "top_p": (top_p, (top_p >= 0) & (top_p <= 1)),
        "uniform": (uniform, (uniform >= 0) & (uniform < 1)),
    }
    for name, (values, fine) in allowed.items():
        if not bool(fine.all()):
            raise KernelError(f"sample: {name} is out of range in {values.tolist()}")


_TAKES = (
    "float32 logits [num_rows, vocab] with stride 1 in a row, and temperature, top_p, uniform (float32 or float64) and "
    "top_k (int32 or int64), each [num_rows], on the CPU"
)

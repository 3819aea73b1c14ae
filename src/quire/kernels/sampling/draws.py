"""Drawing the next token of each row of logits, and log-probabilities."""

import torch
from torch import Tensor

from quire.kernels.backends import backend_of
from quire.kernels.backends.base import Backend
from quire.kernels.checks import KERNEL_ERRORS, are_ids, describe, refusal
from quire.kernels.sampling.tensors import SamplingTensors


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """One token id per row of logits [num_rows, vocab] float32 -> [num_rows] int64, as reference_sampling.sample.

    The logits stay as they are. NaN counts as -inf. A row gives the same token on every instruction set.
    """
    backend = backend_of(logits)
    _check(backend, "sample", logits, how)
    with KERNEL_ERRORS:
        return backend.sample(logits, how)


def processed_logits(logits: Tensor, how: SamplingTensors, rows: Tensor) -> Tensor:
    """The logits from which the tokens of some rows [count] int64 are drawn -> [count, vocab] float32: changed, divided
    by the temperature, -inf where top-k, min-p or top-p cut. The softmax of a row is the distribution of its token."""
    backend = backend_of(logits)
    _check(backend, "processed_logits", logits, how)
    if not are_ids(backend.holds, rows):
        raise refusal("processed_logits", "contiguous int64 rows [count] on the logits' device", rows=rows)
    with KERNEL_ERRORS:
        return backend.processed_logits(logits, how, rows)


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, *, rows: Tensor | None = None, normalized: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token per row of logits [num_logits, vocab] float32, and of the num_top likeliest.

    `rows` [num_rows] int64: which rows of the logits (None: all, in order); token_ids [num_rows] int64. Returns ids
    [num_rows, 1 + num_top] int32, the token's own first, then the likeliest in order; their log-probabilities as
    float32; and ranks [num_rows] int32: 1 + how many tokens are likelier. Not `normalized`: logits instead. A row's
    bits depend on that row alone and are the same on every instruction set.
    """
    backend = backend_of(logits)
    if rows is None and _are_logits(logits):
        rows = torch.arange(logits.shape[0], device=logits.device)
    if not (
        _are_logits(logits)
        and rows is not None
        and all(are_ids(backend.holds, t) for t in (rows, token_ids))
        and rows.shape == token_ids.shape
        and 0 <= num_top <= logits.shape[1]
    ):
        takes = f"{_LOGITS}, contiguous int64 rows and token_ids of one length on their device, and num_top up to vocab"
        raise refusal("top_logprobs", takes, logits=logits, rows=rows, token_ids=token_ids, num_top=num_top)
    with KERNEL_ERRORS:
        return backend.top_logprobs(logits, token_ids, num_top, rows, normalized)


def _check(backend: Backend, kernel: str, logits: Tensor, how: SamplingTensors) -> None:
    if not _are_logits(logits):
        raise refusal(kernel, _LOGITS, logits=logits)
    num_rows, vocab = logits.shape
    if not how.fits(num_rows, vocab, backend.holds):
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        given = {name: getattr(how, name) for name in names}
        if how.changes is not None:
            given["changes"] = [describe(t) for t in how.changes.tensors()]
        takes = f"tensors as SamplingTensors and LogitChanges state them, for {num_rows} rows of {vocab} logits"
        raise refusal(kernel, takes, **given)


def _are_logits(logits: Tensor) -> bool:
    return (
        logits.dim() == 2
        and logits.dtype is torch.float32
        and logits.shape[1] > 0
        and (logits.is_contiguous() or logits.stride(1) == 1)
    )


_LOGITS = "float32 logits [num_rows, vocab] with stride 1 in a row"

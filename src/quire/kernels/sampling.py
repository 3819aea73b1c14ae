"""Drawing the next token of each row of logits, and log-probabilities."""

from typing import Any

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels import reference_sampling as reference
from quire.kernels.backend import native
from quire.kernels.checks import check_range, describe, native_errors, refusal
from quire.kernels.sampling_tensors import LogitChanges, SamplingTensors, TokenLists
from quire.kernels.workspace import empty


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """One token id per row of logits [num_rows, vocab] float32 -> [num_rows] int64, as reference_sampling.sample.

    The logits stay as they are. NaN counts as -inf. A row gives the same token on every instruction set.
    """
    _check("sample", logits, how)
    if native is None:
        return reference.sample(logits, how)
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    with native_errors():
        native.sample(_native_args(logits, how), out.data_ptr())
    return out


def processed_logits(logits: Tensor, how: SamplingTensors, rows: Tensor) -> Tensor:
    """What the tokens of some rows [count] int64 are drawn from -> [count, vocab] float32, changed and divided by the
    temperature, -inf where top-k, min-p or top-p cut. The softmax of a row is the distribution of its token."""
    _check("processed_logits", logits, how)
    if not _is_ids(rows):
        raise refusal("processed_logits", "contiguous int64 rows [count] on the CPU", rows=rows)
    if native is None:
        check_range("processed_logits: row", rows, logits.shape[0])
        return reference.processed_logits(logits, how, rows)
    out = empty((rows.shape[0], logits.shape[1]), torch.float32)
    with native_errors():
        native.processed_logits(_native_args(logits, how), rows.data_ptr(), rows.shape[0], out.data_ptr())
    return out


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, *, rows: Tensor | None = None, normalized: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of one token per row of logits [num_logits, vocab] float32, and of the num_top likeliest.

    `rows` [num_rows] int64: which rows of the logits (None: all, in order); token_ids [num_rows] int64. Returns ids
    [num_rows, 1 + num_top] int32, the token's own first, then the likeliest in order; their log-probabilities as
    float32; and ranks [num_rows] int32: 1 + how many tokens are likelier. Not `normalized`: logits instead. A row's
    bits depend on that row alone and are the same on every instruction set.
    """
    if rows is None and _are_logits(logits):
        rows = torch.arange(logits.shape[0])
    if not (
        _are_logits(logits)
        and rows is not None
        and all(_is_ids(t) for t in (rows, token_ids))
        and rows.shape == token_ids.shape
        and 0 <= num_top <= logits.shape[1]
    ):
        takes = f"{_LOGITS}, contiguous int64 rows and token_ids of one length on the CPU, and num_top up to vocab"
        raise refusal("top_logprobs", takes, logits=logits, rows=rows, token_ids=token_ids, num_top=num_top)
    if native is None:
        check_range("top_logprobs: row", rows, logits.shape[0])
        check_range("top_logprobs: token id", token_ids, logits.shape[1])
        return reference.top_logprobs(logits[rows], token_ids, num_top, normalized)
    count = rows.shape[0]
    ids = torch.empty(count, 1 + num_top, dtype=torch.int32)
    logprobs = torch.empty(count, 1 + num_top, dtype=torch.float32)
    ranks = torch.empty(count, dtype=torch.int32)
    given = (logits.data_ptr(), logits.stride(0), *logits.shape, rows.data_ptr(), token_ids.data_ptr(), count)
    with native_errors():
        native.top_logprobs(*given, num_top, normalized, ids.data_ptr(), logprobs.data_ptr(), ranks.data_ptr())
    return ids, logprobs, ranks


def _native_args(logits: Tensor, how: SamplingTensors) -> Any:
    """native.SampleArgs: addresses, so the tensors must outlive it. Raises where values are out of range."""
    num_rows, vocab = logits.shape
    changes = None
    if (c := how.changes) is not None:
        lens = (c.masks.shape[0], c.banned.ids.shape[0], c.biased.ids.shape[0], len(c.histories))
        num_past = c.histories.ids.shape[0]
        changes = native.LogitChanges([t.data_ptr() for t in c.tensors()], num_rows, *lens, num_past, vocab)
    per_row = (how.temperature, how.top_k, how.top_p, how.min_p, how.uniform)
    return native.SampleArgs(
        logits.data_ptr(), logits.stride(0), num_rows, vocab, *(t.data_ptr() for t in per_row), changes
    )


def _check(kernel: str, logits: Tensor, how: SamplingTensors) -> None:
    if not _are_logits(logits):
        raise refusal(kernel, _LOGITS, logits=logits)
    num_rows, vocab = logits.shape
    if not how.fits(num_rows, vocab):
        names = ("temperature", "top_k", "top_p", "min_p", "uniform")
        given = {name: getattr(how, name) for name in names}
        if how.changes is not None:
            given["changes"] = [describe(t) for t in how.changes.tensors()]
        takes = f"tensors as SamplingTensors and LogitChanges state them, for {num_rows} rows of {vocab} logits"
        raise refusal(kernel, takes, **given)
    if native is None:
        _check_ranges(how, vocab)


def _are_logits(logits: Tensor) -> bool:
    return (
        logits.dim() == 2
        and logits.is_cpu
        and logits.dtype is torch.float32
        and logits.shape[1] > 0
        and (logits.stride(1) == 1 or logits.is_contiguous())
    )


def _is_ids(ids: Tensor) -> bool:
    return ids.dim() == 1 and ids.dtype is torch.int64 and ids.is_contiguous() and ids.is_cpu


def _check_ranges(how: SamplingTensors, vocab: int) -> None:
    """What the native kernel checks itself, for the reference."""
    allowed = {
        "temperature": how.temperature >= 0,
        "top_k": how.top_k >= 0,
        "top_p": (how.top_p >= 0) & (how.top_p <= 1),
        "min_p": (how.min_p >= 0) & (how.min_p <= 1),
        "uniform": (how.uniform >= 0) & (how.uniform < 1),
    }
    if (c := how.changes) is not None:
        allowed["mask_of"] = (c.mask_of >= -1) & (c.mask_of < len(c.masks))
        allowed["history_of"] = (c.history_of >= -1) & (c.history_of < len(c.histories))
        allowed["repetition_penalty"] = c.penalties[:, 0] > 0
        lists = {"banned": c.banned, "biased": c.biased, "histories": c.histories}
        for name, given in lists.items():
            allowed[f"the starts of {name}"] = torch.cat((given.starts[:1] == 0, given.starts.diff() >= 0))
            allowed[f"the starts of {name}"][-1] &= given.starts[-1] == len(given.ids)
        lens = c.histories.starts.diff()
        allowed["num_prompt_tokens"] = (c.num_prompt_tokens >= 0) & (c.num_prompt_tokens <= lens)
    for name, fine in allowed.items():
        if not bool(fine.all()):
            raise KernelError(f"sample: {name} out of range in row {int(fine.int().argmin())}")
    for name, given in lists.items() if c is not None else ():
        check_range(f"sample: {name} has token id", given.ids, vocab)


_LOGITS = "float32 logits [num_rows, vocab] with stride 1 in a row on the CPU"

__all__ = ["LogitChanges", "SamplingTensors", "TokenLists", "processed_logits", "sample", "top_logprobs"]

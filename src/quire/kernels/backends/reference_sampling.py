"""The definition of what the sampling kernels compute, in plain torch. The native ones are tested against it.

Changes of the logits are float32, as the logits are; probabilities are float64.
"""

import math

import torch
from torch import Tensor

from quire.common.errors import KernelError
from quire.kernels.checks import check_range
from quire.kernels.sampling.tensors import LogitChanges, SamplingTensors


def sample(logits: Tensor, how: SamplingTensors) -> Tensor:
    """Draw one token per row: logits [num_rows, vocab] float32 -> token ids [num_rows] int64. Per row:

    The logits are changed (`changed_logits`). Temperature 0 takes the largest (the lowest id of equals). Otherwise
    tokens are cut (`kept_tokens`), and the token is the first, over the kept ones in id order, whose cumulative
    probability exceeds uniform times the kept total. Where the changes leave nothing larger than -inf, it is the
    likeliest token that the row's mask allows, or 0 without a mask.
    """
    _check_sampling(how, logits.shape[1])
    tokens = []
    for row in range(logits.shape[0]):
        scores = changed_logits(logits, how.changes, row)
        if scores.max() == -torch.inf:
            tokens.append(_likeliest_allowed(logits, how.changes, row))
        elif how.temperature[row] == 0:
            tokens.append(int(scores.argmax()))
        else:
            ids, probs = kept_tokens(scores, how, row)
            cumulative = probs.cumsum(0)
            index = int(torch.searchsorted(cumulative, how.uniform[row] * cumulative[-1], right=True))
            tokens.append(int(ids[min(index, len(ids) - 1)]))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device)


def processed_logits(logits: Tensor, how: SamplingTensors, rows: Tensor) -> Tensor:
    """For each of `rows`: the changed logits, divided (in float64) by the temperature, -inf for tokens that are cut.
    Temperature 0 divides and cuts nothing."""
    _check_sampling(how, logits.shape[1])
    check_range("processed_logits: row", rows, logits.shape[0])
    out = logits.new_full((len(rows), logits.shape[1]), -torch.inf)
    for i, row in enumerate(rows.tolist()):
        scores = changed_logits(logits, how.changes, row)
        if how.temperature[row] == 0 or scores.max() == -torch.inf:
            out[i] = scores
        else:
            ids, _ = kept_tokens(scores, how, row)
            scaled = (scores[ids].double() / how.temperature[row]).float()
            out[i, ids] = scaled.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    return out


def changed_logits(logits: Tensor, changes: LogitChanges | None, row: int) -> Tensor:
    """One row [vocab] as LogitChanges says; NaN becomes -inf."""
    x = logits[row].clone()
    if changes is not None:
        allowed = _allowed(changes, row, len(x))
        if allowed is not None:
            x[~allowed] = -torch.inf
        x[changes.banned[row].long()] = -torch.inf
        start, end = changes.biased.starts[row : row + 2].tolist()
        for token_id, bias in zip(changes.biased.ids[start:end].tolist(), changes.bias[start:end], strict=True):
            x[token_id] += bias
        if changes.history_of[row] >= 0:
            x = _penalized(x, changes, row)
    return x.nan_to_num(-torch.inf, torch.inf, -torch.inf)


def kept_tokens(scores: Tensor, how: SamplingTensors, row: int) -> tuple[Tensor, Tensor]:
    """The ids that stay of one row, rising, and their probabilities, not normalized.

    Tokens are ordered by logit, the lower id first among equals. Of these stay the first top_k (0: all) whose
    probability is at least min_p times the largest; of what is left, the shortest run whose probability reaches top_p
    of theirs (at least one token).
    """
    ordered, ids = scores.double().sort(descending=True, stable=True)
    temperature, largest, min_p = float(how.temperature[row]), float(ordered[0]), float(how.min_p[row])
    keep = int(how.top_k[row]) or len(ids)
    ordered, ids = ordered[:keep], ids[:keep]
    if min_p > 0:
        bound = largest if largest == torch.inf else largest + temperature * math.log(min_p)
        stays = ordered >= bound
        ordered, ids = ordered[stays], ids[stays]
    probs = ((ordered - largest) / temperature).exp().where(ordered < largest, 1.0)
    stays = probs.cumsum(0) - probs < how.top_p[row] * probs.sum()
    if how.top_p[row] == 1:
        stays[:] = True
    stays[0] = True
    ids, order = ids[stays].sort()
    return ids, probs[stays][order]


def top_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor, normalized: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`rows` [num_rows] of logits [num_logits, vocab], token_ids [num_rows] -> ids and log-probabilities [num_rows,
    1 + num_top], of the token and of the likeliest (the lower id first among equals), and ranks [num_rows]: 1 + how
    many tokens are likelier.

    NaN counts as -inf; the log-probabilities of a row of nothing else are -inf; several infinite logits share.
    """
    check_range("top_logprobs: row", rows, logits.shape[0])
    check_range("top_logprobs: token id", token_ids, logits.shape[1])
    scores = logits[rows].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    top = scores.sort(descending=True, stable=True).indices[:, :num_top]
    ids = torch.cat((token_ids[:, None], top), 1)
    chosen = scores.gather(1, ids)
    ranks = 1 + (scores > chosen[:, :1]).sum(1)
    if normalized:
        wide, largest = scores.double(), scores.double().amax(1, keepdim=True)
        total = (wide - largest).exp().where(wide < largest, 1.0).sum(1, keepdim=True)
        below = (chosen.double() - largest).where(chosen < largest, 0.0)
        chosen = (below - total.log()).where(largest > -torch.inf, -torch.inf).float()
    return ids.int(), chosen, ranks.int()


def _allowed(changes: LogitChanges, row: int, vocab: int) -> Tensor | None:
    """[vocab] bool, or None where the row has no mask."""
    mask = int(changes.mask_of[row])
    if mask < 0:
        return None
    return (
        (changes.masks[mask][:, None] >> torch.arange(32, dtype=torch.int32, device=changes.masks.device) & 1)
        .bool()
        .flatten()[:vocab]
    )


def _penalized(x: Tensor, changes: LogitChanges, row: int) -> Tensor:
    history = int(changes.history_of[row])
    token_ids = changes.histories[history].long()
    counts = token_ids[int(changes.num_prompt_tokens[history]) :].bincount(minlength=len(x))
    repetition, frequency, presence = changes.penalties[row]
    seen = torch.zeros_like(x, dtype=torch.bool)
    seen[token_ids] = True
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    x = torch.where(counts > 0, x - frequency * counts.float(), x)
    return torch.where(counts > 0, x - presence, x)


def _likeliest_allowed(logits: Tensor, changes: LogitChanges | None, row: int) -> int:
    scores = logits[row].nan_to_num(-torch.inf, torch.inf, -torch.inf)
    allowed = None if changes is None else _allowed(changes, row, len(scores))
    if allowed is None or not bool(allowed.any()):
        return 0
    ids = allowed.nonzero().flatten()
    return int(ids[scores[ids].argmax()])


def _check_sampling(how: SamplingTensors, vocab: int) -> None:
    """Raise KernelError unless all values are in range."""
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

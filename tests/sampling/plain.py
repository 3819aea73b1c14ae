"""What sampling means, written down again without any of its tricks: one row, plain loops, float64 probabilities."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.common.batch import Draw, DrawnRows, ScheduledSequence


class Mask:
    """Allows some ids of a small vocabulary."""

    def __init__(self, allowed: Sequence[int], vocab_size: int = 45) -> None:
        self.allowed = set(allowed)
        bits = np.zeros(-(-vocab_size // 32) * 32, bool)
        bits[[i for i in allowed if i < vocab_size]] = True
        self.words: npt.NDArray[np.int32] = np.packbits(bits, bitorder="little").view(np.int32)


def sequence(
    draw: Draw | tuple[Draw, ...],
    prompt: Sequence[int],
    output: Sequence[int] = (),
    mask: Mask | None = None,
    seq_id: int = 0,
    num_rows: int = 1,
) -> ScheduledSequence:
    """One that draws the token after prompt and output; with more rows, also those after its last tokens."""
    history = np.array([*prompt, *output], np.int32)
    draws = draw if isinstance(draw, tuple) else (draw,)
    return ScheduledSequence(
        seq_id,
        tuple(history[-num_rows:].tolist()),
        len(history) - num_rows,
        (),
        DrawnRows(
            draws,
            len(prompt),
            num_rows,
            history if any(d.needs_history for d in draws) else None,
            None if mask is None else (mask.words,) * num_rows,
        ),
    )


def changed(
    logits: Tensor, draw: Draw, prompt: Sequence[int], output: Sequence[int], mask: Mask | None = None
) -> Tensor:
    """logits [vocab] float32 after mask, bad words, min_tokens, bias and penalties, in float32 steps."""
    x = logits.clone()
    forbidden = set()
    for token_id in range(len(x)):
        if draw.allowed_token_ids is not None and token_id not in draw.allowed_token_ids:
            forbidden.add(token_id)
        if mask is not None and token_id not in mask.allowed:
            forbidden.add(token_id)
    for *prefix, last in draw.bad_words:
        if not prefix or list(output)[-len(prefix) :] == prefix:
            forbidden.add(last)
    if len(output) < draw.min_tokens:
        forbidden |= set(draw.stop_token_ids)
    for token_id, bias in draw.logit_bias:
        x[token_id] += bias
    repetition, frequency, presence = (
        torch.tensor(p) for p in (draw.repetition_penalty, draw.frequency_penalty, draw.presence_penalty)
    )
    for token_id in {*prompt, *output}:
        x[token_id] = x[token_id] / repetition if x[token_id] > 0 else x[token_id] * repetition
    for token_id in set(output):
        x[token_id] -= frequency * list(output).count(token_id)
        x[token_id] -= presence
    x[sorted(forbidden)] = -torch.inf
    return x


def probabilities(x: Tensor, draw: Draw) -> Tensor:
    """[vocab] float64 after temperature, min_p, top_k and top_p."""
    if draw.temperature == 0:
        return torch.nn.functional.one_hot(x.argmax(), len(x)).double()
    probs = (x.double() / draw.temperature).softmax(0)
    order = sorted(range(len(x)), key=lambda i: (-float(x[i]), i))
    order = [i for i in order if probs[i] >= draw.min_p * probs.max()]
    order = order[: draw.top_k or None]
    total, before, kept = sum(float(probs[i]) for i in order), 0.0, []
    for i in order:
        if kept and before >= draw.top_p * total:
            break
        kept.append(i)
        before += float(probs[i])
    result = torch.zeros(len(x), dtype=torch.float64)
    result[kept] = probs[kept]
    return result / result.sum()

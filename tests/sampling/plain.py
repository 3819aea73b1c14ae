"""What sampling means, written down again without any of its tricks: one row, plain loops, float64 probabilities."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.common.batch import Draw, ScheduledSequence


class Mask:
    """A TokenMask that allows some ids."""

    def __init__(self, allowed: Sequence[int]) -> None:
        self.allowed = set(allowed)

    def fill(self, words: npt.NDArray[np.int32]) -> None:
        for word in range(len(words)):
            bits = sum(1 << bit for bit in range(32) if word * 32 + bit in self.allowed)
            words[word] = bits - (1 << 32) if bits >> 31 else bits


def sequence(
    draw: Draw | tuple[Draw, ...], prompt: Sequence[int], output: Sequence[int] = (), **more
) -> ScheduledSequence:
    """One that draws the token after prompt and output."""
    past = np.array([*prompt, *output], np.int32)
    draws = draw if isinstance(draw, tuple) else (draw,)
    needed = past if any(d.needs_past for d in draws) else None
    given = {"seq_id": 0, "past": needed, **more}
    return ScheduledSequence(
        token_ids=(int(past[-1]),),
        start=len(past) - 1,
        block_tables=(),
        draws=draws,
        num_prompt_tokens=len(prompt),
        **given,
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

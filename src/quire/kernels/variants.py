"""Values that choose among the variants of a kernel."""

import math
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.checks import refusal


@dataclass(frozen=True, slots=True)
class XIELU:
    """xIELU (Huang and Schlag 2025): alpha_p x^2 + beta x for x > 0, alpha_n (e^x - 1 - x) + beta x otherwise.

    The alphas are those that the formula multiplies with: a model stores numbers that it makes positive first.
    """

    alpha_p: float
    alpha_n: float
    beta: float = 0.5


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """The gated activation of gpt-oss (OpenAI 2025): g sigmoid(alpha g) (u + 1), where g is the gate, at most `limit`,
    and u the second half, within -limit and limit."""

    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise refusal("ClampedSwiGLU", "a limit above 0", limit=self.limit)


ActivationKind = str | XIELU | ClampedSwiGLU
"""A name in `checks.ACTIVATIONS`, or a kind with parameters."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionVariant:
    """How the scores of an attention layer become weights. The default is plain causal attention.

    A score is `scale * (query . key)`. It is capped first, then the slope is added, then keys that the token does not
    see are left out, and the sink joins the softmax.

    Raises KernelError for values that leave nothing to see. The shapes of the tensors are checked where they are used.
    """

    sliding_window: int | None = None
    """A token sees this number of positions, itself included."""
    chunk_size: int | None = None
    """A token sees keys of its own chunk only: those at positions >= position // chunk_size * chunk_size."""
    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap), as in Gemma 2 (2024)."""
    sinks: Tensor | None = None
    """[num_heads] float32, finite: a score of each head that takes its share of the softmax and has no value, as in
    gpt-oss. It is neither scaled nor capped."""
    slopes: Tensor | None = None
    """[num_heads] float32: slope * (key position - query position), which is never above 0 for a positive slope, is
    added to each score (ALiBi, Press et al. 2022)."""

    def __post_init__(self) -> None:
        spans = self.sliding_window, self.chunk_size
        has_cap = self.softcap is None or 0 < self.softcap < math.inf
        if not has_cap or any(span is not None and span < 1 for span in spans):
            given = {"sliding_window": self.sliding_window, "chunk_size": self.chunk_size, "softcap": self.softcap}
            takes = "a sliding_window and a chunk_size of at least 1 and a finite softcap above 0, or None"
            raise refusal("AttentionVariant", takes, **given)


PLAIN = AttentionVariant()
"""Causal attention without any variant."""

"""Values that choose among the variants of a kernel."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire.kernels.checks import is_cap, is_count, refusal


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


Tables = Sequence[tuple[Tensor, Tensor | None]]
"""Each a table [num_rows, width] with the ids of its rows [num_tokens] int64, or None for the first row everywhere."""
Sequences = tuple[Tensor, Tensor, Tensor]
"""query_start, seq_lens and block_tables of a batch, as `kernels.paged_attention` takes them."""
ActivationKind = str | XIELU | ClampedSwiGLU
"""A name in `checks.ACTIVATIONS`, or a kind with parameters."""


@dataclass(frozen=True, slots=True)
class Activated:
    """What is made of a product's x first: as `activation` or, if `is_gated`, as `gated_activation`."""

    kind: ActivationKind
    is_gated: bool


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
        has_cap = self.softcap is None or is_cap(self.softcap)
        if not has_cap or not all(span is None or is_count(span, 1) for span in spans):
            given = {"sliding_window": self.sliding_window, "chunk_size": self.chunk_size, "softcap": self.softcap}
            takes = "an int64 sliding_window and chunk_size of at least 1 and a softcap from 1.2e-38 to 1.7e38, or None"
            raise refusal("AttentionVariant", takes, **given)


PLAIN = AttentionVariant()
"""Causal attention without any variant."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderVariant:
    """How the scores of an attention layer without a cache become weights. The default lets all tokens of a sequence
    see each other.

    A score is `scale * (query . key)`. What the distance of the two tokens says is added to it, then keys that the
    token does not see are left out. The shapes of the tensors are checked where they are used.
    """

    window: int | None = None
    """The largest distance at which tokens see each other, before and after."""
    slopes: Tensor | None = None
    """[num_heads] float32: -slope * distance is added to each score (ALiBi, Press et al. 2022, in both directions)."""
    bias: Tensor | None = None
    """[num_heads, 2 * reach + 16] float32: entry `reach + key position - query position` is added to each score. The
    last 15 of each head may hold anything. Sequences have at most `reach + 1` tokens."""

    def __post_init__(self) -> None:
        if self.window is not None and not is_count(self.window, 0):
            raise refusal("EncoderVariant", "an int64 window of at least 0, or None", window=self.window)


UNMASKED = EncoderVariant()
"""Attention of all tokens of a sequence to each other."""


@dataclass(frozen=True, slots=True, eq=False)
class DistanceTerms:
    """What queries and keys themselves say of distances: disentangled attention (He et al. 2021).

    `scale * (of_query[query, head, t] + of_key[key, head, t])` is added to a score, where t is
    `term[reach + key position - query position]`.
    """

    of_query: Tensor | None
    """[num_tokens, num_heads, num_terms] float32"""
    of_key: Tensor | None
    """[num_tokens, num_heads, num_terms] float32"""
    term: Tensor
    """[2 * reach + 1] int32, in [0, num_terms)"""

"""What tells one decoder from another: values that a family reads from a config, and that modules are built from."""

from dataclasses import dataclass
from enum import Enum, auto

import torch

from quire.config.kv_cache import KVCacheSpec, LatentSpec, NoCacheSpec, attention_spec
from quire.kernels import ActivationKind
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape


class Span(Enum):
    """What a norm of queries or keys is taken over."""

    HEAD = auto()
    """Each head, all with the same weights."""
    EACH_HEAD = auto()
    """Each head, by weights of its own; a layer norm."""
    PROJECTION = auto()
    """All heads of a token together."""


@dataclass(frozen=True, slots=True)
class HeadNormShape:
    """Norms of queries and keys."""

    norm: NormShape
    span: Span = Span.HEAD
    after_rope: bool = False
    """Whether heads are rotated first and normed then."""
    is_apart: bool = False
    """With EACH_HEAD: whether the checkpoint has a tensor for each head (`norms.0.weight`)."""


class QKVLayout(Enum):
    """How a checkpoint stores the projections to queries, keys and values."""

    APART = auto()
    """In three tensors."""
    STACKED = auto()
    """In one tensor: all queries, all keys, all values."""
    BY_GROUP = auto()
    """In one tensor: the queries that share a key, that key and its value; then the next group."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention (Ainslie et al. 2023)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qkv_bias: bool = False
    o_bias: bool = False
    qkv_layout: QKVLayout = QKVLayout.APART
    is_transposed: bool = False
    """Whether the checkpoint has matrices [in, out], as GPT-2 has."""
    rope: RopeShape | None = None
    head_norm: HeadNormShape | None = None
    is_causal: bool = True
    """Whether a token sees no later ones. If it does, sequences are computed whole, and nothing is kept of them."""
    sliding_window: int | None = None
    """The number of tokens that a token sees, itself included; in both directions, the largest distance at which it
    does. None: all."""
    chunk_size: int | None = None
    """A token sees tokens of its own chunk of this many positions. None: all."""
    softcap: float | None = None
    """Scores become `cap * tanh(score / cap)`."""
    slopes: tuple[float, ...] | None = None
    """For each head, what is subtracted from a score for each position that the key is away (ALiBi)."""
    has_sinks: bool = False
    """Whether a logit of each head joins the softmax and has no value."""
    clip: float | None = None
    """Queries, keys and values are clipped to [-clip, clip], after norms of heads and before they are rotated."""
    output_multiplier: float = 1.0
    """Of what attention gives, before it is summed."""
    input_width: int | None = None
    """The width of what it reads. None: the hidden size."""

    def cache_spec(self, dtype: str) -> KVCacheSpec:
        """What it keeps, in `dtype`."""
        if not self.is_causal:
            return NoCacheSpec()
        return attention_spec(self.num_kv_heads, self.head_dim, dtype, self.sliding_window or self.chunk_size)


@dataclass(frozen=True, slots=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2"): keys and values of all heads are products of one
    latent, and a part of the keys, which is rotated, is the same for all heads."""

    num_heads: int
    rank: int
    """The width of the latent."""
    plain_dim: int
    """The first dimensions of a head's query and key, which are not rotated."""
    value_dim: int
    """The width of a head's value."""
    scale: float
    rope: RopeShape
    """Of the dimensions behind the plain ones: all of them are rotated."""
    norm: NormShape
    """Of latents."""
    query_rank: int | None = None
    """The width of the latent that queries are products of. None: they are products of the hidden state."""
    has_bias: bool = False
    """Whether the projections to latents, and the last one, have biases."""
    output_multiplier: float = 1.0
    """Of what attention gives, before it is summed."""

    @property
    def head_dim(self) -> int:
        """The width of a head's query and key."""
        return self.plain_dim + self.rope.rotary_dim

    def cache_spec(self, dtype: str) -> KVCacheSpec:
        """What it keeps, in `dtype`."""
        return LatentSpec(self.rank, self.rope.rotary_dim, dtype)


@dataclass(frozen=True, slots=True)
class MLPShape:
    """`down(act(up(x)))`, or if gated `down(act(gate(x)) * up(x))` (Shazeer 2020)."""

    width: int
    activation: ActivationKind
    """Or `xielu`, whose parameters are weights, in a plain MLP."""
    is_gated: bool = True
    is_stacked: bool = False
    """Whether the checkpoint has gate and up in one tensor."""
    up_bias: bool = False
    """Of the gate too."""
    down_bias: bool = False
    is_transposed: bool = False
    """Whether the checkpoint has matrices [in, out]; of a plain MLP alone."""
    output_multiplier: float = 1.0
    """Of what the MLP gives, before it is summed."""


class Arrangement(Enum):
    """Where a layer's norms stand, and what its MLP reads."""

    PRE_NORM = auto()
    """Before attention and MLP (Llama)."""
    PRE_NORM_OF_MLP = auto()
    """Before the MLP alone."""
    POST_NORM = auto()
    """Of the sums of residual and attention, and of residual and MLP (the original Transformer)."""
    OUTPUT_NORM = auto()
    """Of what attention and MLP give, before it is summed (OLMo 2)."""
    SANDWICH = auto()
    """Before attention and MLP, and of what they give (Gemma 2)."""
    PARALLEL = auto()
    """One norm, which both attention and MLP read (GPT-J)."""
    PARALLEL_TWO_NORMS = auto()
    """Attention and MLP read the same residual, each through its own norm (GPT-NeoX)."""
    RESIDUAL_AFTER_NORM = auto()
    """Before attention and MLP, where what they give is added to what the norm gave (an option of BLOOM)."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer."""

    attention: AttentionShape | LatentAttentionShape
    mlp: MLPShape | ExpertsShape
    norm: NormShape
    arrangement: Arrangement = Arrangement.PRE_NORM
    output_norm: NormShape | None = None
    """Of the norms of what attention and MLP give. None: as the others."""


@dataclass(frozen=True, slots=True)
class PositionsShape:
    """A learned table of positions, added to the embeddings."""

    num_rows: int
    first_row: int = 0
    """The row of position 0."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """A whole decoder with its language model head."""

    hidden_size: int
    layers: tuple[LayerShape, ...]
    final_norm: NormShape | None
    is_tied: bool
    """Whether the head uses the token table."""
    dtype: torch.dtype
    embed_width: int
    """The width of the token table; where it is not hidden_size (OPT-350m), projections lead in and out."""
    embed_multiplier: float = 1.0
    """Of the rows of the token table, but not of embeddings that a caller gives."""
    embed_norm: NormShape | None = None
    positions: PositionsShape | None = None
    head_bias: bool = False
    is_head_normalized: bool = False
    """Whether each row of the head is divided by its length."""
    logit_multiplier: float = 1.0
    logit_softcap: float | None = None
    """Logits become `cap * tanh(logit / cap)`, after the multiplier."""

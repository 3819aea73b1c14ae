"""Rotary position embedding (Su et al. 2021) and the ways of stretching it beyond the length a model was trained on."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import MAX_SIZE, HFConfig
from quire.config.model import ModelConfig

_MAX_DIM = 65536
"""Tables are made before the memory plan has counted them."""


@dataclass(frozen=True, slots=True)
class RopeShape:
    """What determines a table. Layers of equal shapes share one."""

    parameters: HFConfig
    """As `quire.config.model.rope_config` returns them."""
    rotary_dim: int
    """The first dimensions of a head are rotated, this many."""
    is_interleaved: bool = False
    """Whether dimensions 2i and 2i + 1 are rotated together, and not i and i + rotary_dim / 2."""
    query_growth: float | None = None
    """Queries are multiplied by `1 + query_growth * log(1 + n)`, where n counts how often their position has passed the
    length trained on (Llama 4, Ministral 3). None: they are not."""
    is_backward: bool = False
    """Whether heads are rotated by the negative angles (NanoChat)."""

    @classmethod
    def read(
        cls,
        parameters: HFConfig,
        head_dim: int,
        *,
        is_interleaved: bool = False,
        rotary_dim: int | None = None,
        scales_queries: bool = False,
    ) -> "RopeShape":
        """`rotary_dim`: if not given, the share of a head that the parameters name. `scales_queries`: whether the
        parameters may have a `llama_4_scaling_beta`. Raises CheckpointError for an odd number of dimensions, for
        more than a head has, or for more than _MAX_DIM, and UnsupportedModelError for queries that are scaled but
        rotated in part."""
        share = parameters.number("partial_rotary_factor")
        rotary_dim = int(min(head_dim * share, MAX_SIZE)) if rotary_dim is None else rotary_dim
        if rotary_dim % 2 or not 0 < rotary_dim <= min(head_dim, _MAX_DIM):
            raise CheckpointError(
                f"{parameters.source}: rotary embedding needs an even number of dimensions, not {rotary_dim}: head_dim "
                f"is {head_dim}, partial_rotary_factor is {share:g}, and at most {_MAX_DIM} dimensions are supported"
            )
        growth = parameters.get("llama_4_scaling_beta") or None
        if growth is not None:
            growth = parameters.number("llama_4_scaling_beta")
            if not scales_queries or rotary_dim != head_dim:
                raise UnsupportedModelError(f"{parameters.source}: 'llama_4_scaling_beta' is not supported here")
        return cls(parameters, rotary_dim, is_interleaved, growth)


class RotaryEmbedding(nn.Module):
    """Rotates query and key heads by their position, of which it takes one row: a token has one position.

    The table is made once, for positions up to `config.max_model_len`. Dynamic NTK and longrope scaling depend, in
    transformers, on the longest sequence of the batch at hand; here they depend on max_model_len, so that a token's
    keys never depend on what else runs or how long its sequence will become. If max_model_len is within the length
    trained on, they are the plain (dynamic) or short (longrope) table; beyond it, the table transformers takes for a
    sequence of max_model_len tokens. Lower max_model_len to get the former.
    """

    def __init__(self, config: ModelConfig, shape: RopeShape) -> None:
        super().__init__()
        self.shape = shape
        self.cos_sin = rotary_table(config, shape)  # [max_model_len, rotary_dim] float32
        self.query_cos_sin = self.cos_sin if self.is_uniform else _scaled_table(self.cos_sin, shape)  # as cos_sin

    @property
    def is_uniform(self) -> bool:
        """Whether queries and keys are rotated by one table."""
        return self.shape.query_growth is None

    def forward(self, positions: Tensor, *heads: Tensor) -> None:
        """Rotate each of `heads` [num_tokens, num_heads, head_dim] in place by positions [num_tokens]."""
        for x in heads:
            kernels.rotary_embedding(x, positions, self.cos_sin, interleaved=self.shape.is_interleaved)

    def rotate_pair(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The same two, rotated in place."""
        for x, table in ((query, self.query_cos_sin), (key, self.cos_sin)):
            kernels.rotary_embedding(x, positions, table, interleaved=self.shape.is_interleaved)
        return query, key


def _scaled_table(cos_sin: Tensor, shape: RopeShape) -> Tensor:
    """The table of queries: rotating and scaling are one product."""
    assert shape.query_growth is not None
    original = shape.parameters.size("original_max_position_embeddings")
    passed = torch.arange(len(cos_sin)) // original  # [max_model_len]
    return cos_sin * (1 + shape.query_growth * torch.log(1 + passed.float()))[:, None]


def shared_rotary(made: nn.ModuleList, config: ModelConfig, shape: RopeShape) -> RotaryEmbedding:
    """The one in `made` of equal shape, or else a new one, which is added there."""
    for rotary in made:
        if isinstance(rotary, RotaryEmbedding) and rotary.shape == shape:
            return rotary
    rotary = RotaryEmbedding(config, shape)
    made.append(rotary)
    return rotary


def rotary_table(config: ModelConfig, shape: RopeShape) -> Tensor:
    """Cosines, then sines, of every position: [max_model_len, rotary_dim] float32."""
    rope = shape.parameters
    rope_type = rope.text("rope_type")
    if rope_type not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise UnsupportedModelError(f"{rope.source}: rope_type is {rope_type[:80]!r}, supported are {known}")
    try:
        inv_freq, attention_factor = _SCALINGS[rope_type](config, rope, shape.rotary_dim)
    except (ArithmeticError, ValueError) as error:  # a base of 1, a length of 1, ...
        raise CheckpointError(f"{rope.source}: these rope parameters make no sense: {str(dict(rope))[:300]}") from error
    angles = torch.arange(config.max_model_len, dtype=torch.float32)[:, None] * inv_freq  # [max_model_len, dim / 2]
    if shape.is_backward:
        angles = -angles
    return torch.cat([angles.cos(), angles.sin()], dim=-1).mul_(attention_factor)


def _base_powers(dim: int, base: float) -> Tensor:
    return base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)  # [dim / 2]


def _default(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    return 1.0 / _base_powers(dim, rope.number("rope_theta")), 1.0


def _linear(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    """All positions divided by the factor (Chen et al. 2023)."""
    return _default(config, rope, dim)[0] / rope.number("factor"), 1.0


def _ntk(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    """The base times the factor, which stretches low frequencies more, and all of them a little (GTE)."""
    if rope.get("mixed_b") is not None:
        raise UnsupportedModelError(f"{rope.source}: 'mixed_b' is not supported")
    factor = rope.number("factor")
    return 1.0 / (_base_powers(dim, rope.number("rope_theta") * factor) * math.pow(factor, 2 / dim)), 1.0


def _dynamic(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    """The base grows with the length, so that the lowest frequency is stretched fully and the highest not at all; or by
    a fixed `alpha` (HunYuan)."""
    if rope.get("alpha") is not None:
        return 1.0 / _base_powers(dim, rope.number("rope_theta") * rope.number("alpha") ** (dim / (dim - 2))), 1.0
    factor, original = rope.number("factor"), config.max_position_embeddings
    stretch = factor * max(config.max_model_len, original) / original - (factor - 1)
    return 1.0 / _base_powers(dim, rope.number("rope_theta") * stretch ** (dim / (dim - 2))), 1.0


def _yarn(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    """Low frequencies stretched, high ones kept, a ramp between; logits sharpened (Peng et al. 2023)."""
    base, original = rope.number("rope_theta"), rope.size("original_max_position_embeddings")
    factor = rope.number("factor", config.max_position_embeddings / original)
    bounds = [
        dim * math.log(original / (rope.number(key, turns) * 2 * math.pi)) / (2 * math.log(base))
        for key, turns in (("beta_fast", 32.0), ("beta_slow", 1.0))
    ]  # the dimensions that turn this often within the original length
    if rope.flag("truncate", True):
        bounds = [math.floor(bounds[0]), math.ceil(bounds[1])]
    low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
    width = high - low if high != low else 0.001
    stretched = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)  # [dim / 2]
    inv_freq = 1.0 / _base_powers(dim, base)
    return inv_freq / factor * stretched + inv_freq * (1 - stretched), _yarn_attention_factor(rope, factor)


def _yarn_attention_factor(rope: HFConfig, factor: float) -> float:
    def sharpening(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    if rope.get("attention_factor") is not None:
        return rope.number("attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return sharpening(rope.number("mscale")) / sharpening(rope.number("mscale_all_dim"))
    return sharpening(1.0)


def _llama3(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    """Wavelengths beyond the original length stretched, short ones kept, a smooth step between (Llama 3.1)."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{rope.source}: high_freq_factor {high} must be greater than low_freq_factor {low}")
    inv_freq = _default(config, rope, dim)[0]
    turns = rope.size("original_max_position_embeddings") * inv_freq / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)  # [dim / 2]: 1 at short wavelengths, 0 at long ones
    return inv_freq / rope.number("factor") * (1 - kept) + inv_freq * kept, 1.0


def _longrope(config: ModelConfig, rope: HFConfig, dim: int) -> tuple[Tensor, float]:
    """A searched factor per frequency, one list within the original length and one beyond (Ding et al. 2024)."""
    original = rope.size("original_max_position_embeddings")
    key = "long_factor" if config.max_model_len > original else "short_factor"
    factor = rope.number("factor", config.max_position_embeddings / original)
    attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    inv_freq = 1.0 / (torch.tensor(rope.numbers(key, dim // 2)) * _base_powers(dim, rope.number("rope_theta")))
    return inv_freq, rope.number("attention_factor", attention_factor)


_SCALINGS: dict[str, Callable[[ModelConfig, HFConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "ntk": _ntk,
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}

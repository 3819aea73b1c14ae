"""DeepSeek-V2, V3 and R1 (DeepSeek-AI 2024, 2025): multi-head latent attention, and experts beside shared ones"""

import math
from typing import ClassVar

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig, rope_config
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import prediction_layer, read_routing
from quire.models.decoder.shapes import LatentAttentionShape, LayerShape
from quire.models.families.mixtures.glm4_moe import corrected_experts
from quire.models.layers.activation import activation_kind
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape
from quire.models.weights.stacked import Stack


class LatentDecoder(Decoder):
    """A decoder with multi-head latent attention."""

    has_interleaved_rope: ClassVar[bool] = True

    @classmethod
    def layer_shape(cls, hf: HFConfig, layer: int) -> LayerShape:
        mlp = cls.experts_shape(hf, layer) or cls.mlp_shape(hf, layer)
        return LayerShape(cls.latent_shape(hf), mlp, cls.norm_shape(hf))

    @classmethod
    def latent_shape(cls, hf: HFConfig) -> LatentAttentionShape:
        """The attention of every layer."""
        plain_dim, rotary_dim = hf.size("qk_nope_head_dim"), hf.size("qk_rope_head_dim")
        parameters, rank = rope_config(hf), hf.size("kv_lora_rank")
        if rank % 2:
            raise CheckpointError(f"{hf.source}: 'kv_lora_rank' is {rank}, but must be even")
        return LatentAttentionShape(
            num_heads=hf.size("num_attention_heads"),
            rank=rank,
            plain_dim=plain_dim,
            value_dim=hf.size("v_head_dim"),
            scale=(plain_dim + rotary_dim) ** -0.5 * _sharpening(parameters),
            rope=RopeShape.read(
                parameters,
                rotary_dim,
                rotary_dim=rotary_dim,
                is_interleaved=hf.flag("rope_interleave", cls.has_interleaved_rope),
            ),
            norm=NormShape(1e-6),
            query_rank=None if hf.get("q_lora_rank") is None else hf.size("q_lora_rank"),
            has_bias=hf.flag("attention_bias", False),
        )


class DeepseekV2ForCausalLM(LatentDecoder):
    """Experts are chosen by a softmax, from groups of experts or from all."""

    default_first_layer: ClassVar[int] = 0
    """The first layer with experts in a config without `first_k_dense_replace`."""

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        _refuse(hf, "moe_layer_freq", (None, 1))
        first = hf.get("first_k_dense_replace", cls.default_first_layer)
        if type(first) is not int or first < 0:
            raise CheckpointError(f"{hf.source}: 'first_k_dense_replace' is {first!r}, but must be a number of layers")
        return None if layer < first else cls.routed_experts(hf)

    @classmethod
    def routed_experts(cls, hf: HFConfig) -> ExpertsShape:
        """The experts of the layers that have some."""
        _refuse(hf, "scoring_func", (None, "softmax"))
        _refuse(hf, "topk_method", (None, "greedy", "group_limited_greedy"))
        in_groups = hf.get("topk_method") == "group_limited_greedy"
        routing = read_routing(
            hf,
            hf.size("n_routed_experts"),
            hf.size("num_experts_per_tok"),
            scale=hf.number("routed_scaling_factor", 1.0),
            num_groups=hf.size("n_group") if in_groups else 1,
            top_groups=hf.size("topk_group") if in_groups else 1,
        )
        width = hf.size("moe_intermediate_size")
        activation = activation_kind(hf, "hidden_act", "silu")
        return ExpertsShape(routing, width, activation, shared_width=width * hf.size("n_shared_experts"))


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Experts are chosen by sigmoids with a correction; the layer that predicts further tokens is a draft head's."""

    default_first_layer: ClassVar[int] = 3

    @classmethod
    def routed_experts(cls, hf: HFConfig) -> ExpertsShape:
        _refuse(hf, "scoring_func", (None, "sigmoid"))
        _refuse(hf, "topk_method", (None, "noaux_tc"))
        for key in ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"):
            hf.size(key)
        return corrected_experts(hf)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return (*super().stacks(config), prediction_layer(config.hf_config))


def _sharpening(rope: HFConfig) -> float:
    """What scores are multiplied by where positions are stretched (the square of YaRN's `mscale`)."""
    if rope.text("rope_type") == "default" or not rope.get("mscale_all_dim"):
        return 1.0
    return (0.1 * rope.number("mscale_all_dim") * math.log(max(1.0, rope.number("factor"))) + 1.0) ** 2


def _refuse(hf: HFConfig, key: str, allowed: tuple[object, ...]) -> None:
    """Raise UnsupportedModelError unless the value is one of these."""
    if hf.get(key) not in allowed:
        names = ", ".join(str(value) for value in allowed if value is not None)
        raise UnsupportedModelError(f"{hf.source}: {key!r} is {str(hf.get(key))[:80]!r}, supported is {names}")

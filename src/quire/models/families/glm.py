"""GLM-4 9B (GLM Team 2024) and GLM-4-0414: half of each head is rotated in pairs, gate and up are one tensor."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement, AttentionShape, MLPShape


class GlmForCausalLM(Decoder):
    """Of 2024."""

    fused: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    default_head_dim = 128
    has_interleaved_rope = True

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), qkv_bias=hf.flag("attention_bias", True))

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), is_stacked=True)


class Glm4ForCausalLM(GlmForCausalLM):
    """With norms on both sides of attention and MLP."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
    )
    arrangement = Arrangement.SANDWICH

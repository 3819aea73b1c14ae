"""GLM-4 9B (GLM Team 2024) and GLM-4-0414: half of each head is rotated in pairs, gate and up are one tensor."""

from typing import ClassVar

from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement


class GlmForCausalLM(Decoder):
    """Of 2024."""

    fused: ClassVar = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
    default_head_dim = 128
    has_interleaved_rope = True
    qkv_bias = ("attention_bias", True)
    has_stacked_mlp = True


class Glm4ForCausalLM(GlmForCausalLM):
    """With norms on both sides of attention and MLP."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"\.post_attention_layernorm\.", ".pre_feedforward_layernorm."),
        (r"\.post_self_attn_layernorm\.", ".post_attention_layernorm."),
        (r"\.post_mlp_layernorm\.", ".post_feedforward_layernorm."),
    )
    arrangement = Arrangement.SANDWICH

"""OPT (Zhang et al. 2022): learned positions, LayerNorm before or after each block, a plain MLP, biases."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import Arrangement, DecoderShape, PositionsShape
from quire.models.layers.norm import NormShape

_POSITION_OFFSET = 2
"""Position 0 is row 2 of the table: the rows before it were a padding token's."""
_EPS = 1e-5


class OPTForCausalLM(Decoder):
    """All sizes, 350m with its post-norm and narrower token table included."""

    renames: ClassVar = (
        (r"^(model\.)?decoder\.", ""),
        (r"^final_layer_norm\.", "norm."),
        (r"\.self_attn_layer_norm\.", ".input_layernorm."),
        (r"\.final_layer_norm\.", ".post_attention_layernorm."),
        (r"\.out_proj\.", ".o_proj."),
        (r"\.fc1\.", ".mlp.up_proj."),
        (r"\.fc2\.", ".mlp.down_proj."),
    )
    ties_by_default = True
    default_activation = "relu"
    has_rope = False
    has_gated_mlp = False
    qkv_bias = o_bias = mlp_bias = ("enable_bias", True)

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        hf, shape = config.hf_config, super().shape(config)
        is_pre_norm = cls.arrangement_of(hf) is Arrangement.PRE_NORM
        has_final_norm = is_pre_norm and not hf.flag("_remove_final_layer_norm", False)
        return replace(
            shape,
            embed_width=hf.size("word_embed_proj_dim", shape.hidden_size),
            positions=PositionsShape(config.max_position_embeddings + _POSITION_OFFSET, _POSITION_OFFSET),
            final_norm=shape.final_norm if has_final_norm else None,
        )

    @classmethod
    def arrangement_of(cls, hf: HFConfig) -> Arrangement:
        return Arrangement.PRE_NORM if hf.flag("do_layer_norm_before", True) else Arrangement.POST_NORM

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        is_affine = hf.flag("layer_norm_elementwise_affine", True)
        return NormShape(_EPS, is_rms=False, has_weight=is_affine, has_bias=is_affine)

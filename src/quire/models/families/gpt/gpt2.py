"""GPT-2 (Radford et al. 2019): learned positions, layer norms, a plain MLP, and matrices stored [in, out]."""

from dataclasses import replace
from typing import ClassVar

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import Setting
from quire.models.decoder.shapes import AttentionShape, DecoderShape, PositionsShape, QKVLayout
from quire.models.layers.norm import NormShape


class GPT2LMHeadModel(Decoder):
    """All sizes, DistilGPT-2 included."""

    renames: ClassVar = (
        (r"^transformer\.", ""),
        (r"^wte\.", "embed_tokens."),
        (r"^wpe\.", "embed_positions."),
        (r"^ln_f\.", "norm."),
        (r"^h\.", "layers."),
        (r"\.ln_1\.", ".input_layernorm."),
        (r"\.ln_2\.", ".post_attention_layernorm."),
        (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
        (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
        (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
        (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
    )
    fused: ClassVar = {}
    ties_by_default = True
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    default_activation = "gelu_new"
    default_mlp_ratio = 4
    has_rope = False
    has_gated_mlp = False
    qkv_bias = o_bias = mlp_bias = True
    qkv_layout = QKVLayout.STACKED
    is_transposed: ClassVar[Setting] = ("transposed_matrices", True)

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        return replace(super().shape(config), positions=PositionsShape(config.max_position_embeddings))

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        attention = super().attention_shape(hf, layer)
        if hf.flag("add_cross_attention", False):
            raise UnsupportedModelError(f"{hf.source}: 'add_cross_attention' is true: only decoders are supported")
        scale = attention.scale if hf.flag("scale_attn_weights", True) else 1.0
        if hf.flag("scale_attn_by_inverse_layer_idx", False):
            scale /= layer + 1
        return replace(attention, scale=scale)

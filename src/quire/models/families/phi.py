"""Phi-1.5 and 2 (Li et al. 2023), and Phi-3 and 4 (Abdin et al. 2024), which share little but the name."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import (
    Arrangement,
    AttentionShape,
    DecoderShape,
    HeadNormShape,
    MLPShape,
    QKVLayout,
)
from quire.models.layers.norm import NormShape


class PhiForCausalLM(Decoder):
    """Attention and a plain MLP side by side, biases everywhere, and a partial rotary embedding."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"^final_layernorm\.", "norm."),
        (r"\.self_attn\.dense\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
        (r"\.mlp\.fc1\.", ".mlp.up_proj."),
        (r"\.mlp\.fc2\.", ".mlp.down_proj."),
    )
    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)
    arrangement = Arrangement.PARALLEL

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        return replace(super().shape(config), head_bias=True)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        norm = HeadNormShape(cls.norm_shape(hf)) if hf.flag("qk_layernorm", False) else None
        return replace(super().attention_shape(hf, layer), qkv_bias=True, o_bias=True, head_norm=norm)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), is_gated=False, up_bias=True, down_bias=True)


class Phi3ForCausalLM(Decoder):
    """Llama with queries, keys and values in one tensor, gate and up in another, and a sliding window or none."""

    fused: ClassVar = {}

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        window = hf.size("sliding_window") if hf.get("sliding_window") is not None else None
        attention = super().attention_shape(hf, layer)
        return replace(attention, qkv_layout=QKVLayout.STACKED, sliding_window=window)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), is_stacked=True)

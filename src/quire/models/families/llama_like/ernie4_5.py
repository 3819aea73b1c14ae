"""ERNIE 4.5 (Baidu 2025) without experts: Llama with heads that are rotated in pairs."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import AttentionShape, MLPShape
from quire.models.layers.norm import NormShape


class Ernie45ForCausalLM(Decoder):
    """`use_bias` is one flag for all projections."""

    ties_by_default = True
    default_head_dim = 128
    has_interleaved_rope = True
    default_norm = NormShape(1e-5)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        bias = hf.flag("use_bias", False)
        return replace(super().attention_shape(hf, layer), qkv_bias=bias, o_bias=bias)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        bias = hf.flag("use_bias", False)
        return replace(super().mlp_shape(hf, layer), up_bias=bias, down_bias=bias)

"""Llama 2 and 3.x (Touvron et al. 2023, Grattafiori et al. 2024)."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import AttentionShape, MLPShape


class LlamaForCausalLM(Decoder):
    """Biases, if there are any, are on all projections of attention, or of the MLP."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        bias = hf.flag("attention_bias", False)
        return replace(super().attention_shape(hf, layer), qkv_bias=bias, o_bias=bias)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        bias = hf.flag("mlp_bias", False)
        return replace(super().mlp_shape(hf, layer), up_bias=bias, down_bias=bias)

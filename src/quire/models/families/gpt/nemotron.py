"""Nemotron 4, Minitron (NVIDIA 2024) and Jais 2 (Inception 2025): Llama with layer norms and a plain MLP."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import AttentionShape, MLPShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.norm import NormShape


class NemotronForCausalLM(LlamaForCausalLM):
    """Squared rectifiers, a partial rotary embedding, and weights of norms that are stored less 1."""

    default_norm = NormShape(1e-5, is_rms=False, has_bias=True, offset=1.0)
    default_activation = "relu2"

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), is_gated=False)


class Jais2ForCausalLM(NemotronForCausalLM):
    """Biases unless the config says otherwise, and weights of norms as they are."""

    default_norm = NormShape(1e-5, is_rms=False, has_bias=True)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        bias = hf.flag("attention_bias", True)
        return replace(super().attention_shape(hf, layer), qkv_bias=bias, o_bias=bias)

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        bias = hf.flag("mlp_bias", True)
        return replace(super().mlp_shape(hf, layer), up_bias=bias, down_bias=bias)

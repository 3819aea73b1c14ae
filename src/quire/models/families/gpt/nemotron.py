"""Nemotron 4 and Minitron (NVIDIA 2024): layer norms whose weights are stored less 1, and a plain MLP."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import MLPShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.activation import activation_kind
from quire.models.layers.norm import NormShape


class NemotronForCausalLM(LlamaForCausalLM):
    """Squared rectifiers, and a partial rotary embedding."""

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        activation = activation_kind(hf, "hidden_act", "relu2")
        return replace(super().mlp_shape(hf, layer), activation=activation, is_gated=False)

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        return NormShape(hf.number("layer_norm_eps", 1e-5), is_rms=False, has_bias=True, offset=1.0)

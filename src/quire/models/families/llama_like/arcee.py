"""AFM (Arcee 2025): Llama with a plain MLP of squared rectifiers."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import MLPShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.activation import activation_kind


class ArceeForCausalLM(LlamaForCausalLM):
    """All sizes."""

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        activation = activation_kind(hf, "hidden_act", "relu2")
        return replace(super().mlp_shape(hf, layer), activation=activation, is_gated=False)

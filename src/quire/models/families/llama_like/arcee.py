"""AFM (Arcee 2025): Llama with a plain MLP of squared rectifiers."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import MLPShape
from quire.models.families.llama import LlamaForCausalLM


class ArceeForCausalLM(LlamaForCausalLM):
    """All sizes."""

    default_activation = "relu2"

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        return replace(super().mlp_shape(hf, layer), is_gated=False)

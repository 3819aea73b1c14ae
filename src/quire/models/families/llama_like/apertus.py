"""Apertus (Swiss AI 2025): Llama with norms of heads and a plain MLP of xIELU, whose parameters are learned."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import MLPShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.activation import activation_kind
from quire.models.layers.norm import NormShape


class ApertusForCausalLM(LlamaForCausalLM):
    """Tensors `beta` and `eps` of the activation are constants that checkpoints repeat."""

    renames: ClassVar = (
        (r"^model\.", ""),
        (r"\.attention_layernorm\.", ".input_layernorm."),
        (r"\.feedforward_layernorm\.", ".post_attention_layernorm."),
    )
    ignored: ClassVar = (*LlamaForCausalLM.ignored, r"\.act_fn\.(beta|eps)$")
    default_norm = NormShape(1e-5)
    has_head_norm = True

    @classmethod
    def mlp_shape(cls, hf: HFConfig, layer: int) -> MLPShape:
        is_learned = hf.text("hidden_act", "xielu") == "xielu"
        activation = "xielu" if is_learned else activation_kind(hf, "hidden_act", "silu")
        return MLPShape(hf.size("intermediate_size"), activation, is_gated=False)

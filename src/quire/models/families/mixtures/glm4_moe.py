"""GLM-4.5, 4.6 (GLM-4.5 Team 2025), dots.llm1 and Solar Open (2025): experts chosen as in DeepSeek-V3."""

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import prediction_layer, read_routing
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.qwen.qwen2 import layer_window
from quire.models.layers.activation import activation_kind
from quire.models.layers.experts import ExpertsShape
from quire.models.weights.stacked import Stack


class Glm4MoeForCausalLM(Decoder):
    """Half of each head is rotated; the layer that predicts further tokens is a draft head's."""

    qkv_bias = ("attention_bias", False)
    has_head_norm = ("use_qk_norm", False)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        first = hf.get("first_k_dense_replace")
        return None if layer < (first if isinstance(first, int) else 1) else corrected_experts(hf)

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        return (*super().stacks(config), prediction_layer(config.hf_config))


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Experts in every layer, and whole heads are rotated."""

    default_head_dim = 128

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        return corrected_experts(hf)


class Dots1ForCausalLM(LlamaForCausalLM):
    """Norms of heads, and windows from layer `max_window_layers` on."""

    has_head_norm = True

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return layer_window(hf, layer, by_default=True)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        first = hf.get("first_k_dense_replace")
        return None if layer < (first if isinstance(first, int) else 0) else corrected_experts(hf, normalizes=False)


def corrected_experts(hf: HFConfig, *, normalizes: bool = True) -> ExpertsShape:
    """Experts chosen by sigmoids, with a correction that balanced their load in training (DeepSeek-AI 2024).
    `normalizes`: whether a config without `norm_topk_prob` does."""
    num_experts, num_groups = hf.size("n_routed_experts", 128), hf.size("n_group", 1)
    routing = read_routing(
        hf,
        num_experts,
        hf.size("num_experts_per_tok", 8),
        scoring="sigmoid",
        is_normalized=hf.flag("norm_topk_prob", normalizes),
        scale=hf.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=hf.size("topk_group", 1),
        has_pairs=num_groups > 1,
    )
    width = hf.size("moe_intermediate_size", 1408)
    return ExpertsShape(
        routing,
        width,
        activation_kind(hf, "hidden_act", "silu"),
        correction_shape=(num_experts,),
        shared_width=width * hf.size("n_shared_experts", 1),
    )

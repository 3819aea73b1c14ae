"""Qwen3-MoE (Yang et al. 2025): Qwen3 with experts."""

from quire.config.hf_config import HFConfig
from quire.models.families.mixtures.qwen2_moe import some_layers_experts
from quire.models.families.qwen.qwen3 import Qwen3ForCausalLM
from quire.models.layers.experts import ExpertsShape


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    """As Qwen2-MoE, without a shared expert."""

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        return some_layers_experts(hf, layer)

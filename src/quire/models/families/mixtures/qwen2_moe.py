"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with experts, one of which all tokens share."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.reading import layer_indices, read_experts
from quire.models.families.qwen.qwen2 import Qwen2ForCausalLM
from quire.models.layers.experts import ExpertsShape


class Qwen2MoeForCausalLM(Qwen2ForCausalLM):
    """What the shared expert counts is the sigmoid of a product of its own."""

    renames = (*Qwen2ForCausalLM.renames, (r"\.shared_expert\.", ".shared_experts."))
    qkv_bias = ("qkv_bias", True)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        shape = some_layers_experts(hf, layer)
        shared_width = hf.size("shared_expert_intermediate_size", 5632)
        return None if shape is None else replace(shape, shared_width=shared_width, shared_gate=True)


def some_layers_experts(hf: HFConfig, layer: int) -> ExpertsShape | None:
    """The experts of every `decoder_sparse_step`-th layer that `mlp_only_layers` does not name."""
    if layer in layer_indices(hf, "mlp_only_layers") or (layer + 1) % hf.size("decoder_sparse_step", 1):
        return None
    is_normalized = hf.flag("norm_topk_prob", False)
    num_experts = hf.size("num_experts" if "num_experts" in hf else "num_local_experts")
    top_k = hf.size("num_experts_per_tok")
    return read_experts(hf, num_experts, top_k, width="moe_intermediate_size", is_normalized=is_normalized)

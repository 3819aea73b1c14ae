"""Granite 3 MoE (IBM 2024): Granite with experts in each layer, and one that all tokens share or none."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.reading import read_experts
from quire.models.families.llama_like.granite import GraniteForCausalLM
from quire.models.layers.experts import ExpertsShape
from quire.models.weights.stacked import Stack


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """The experts of a layer lie in two tensors. The multiplier of residuals is one of the experts' weights."""

    renames = (
        *GraniteForCausalLM.renames,
        (r"\.block_sparse_moe\.", ".mlp."),
        (r"\.mlp\.router\.layer\.", ".mlp.gate."),
    )

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        both = (".experts.{}.gate_proj.weight", ".experts.{}.up_proj.weight")
        return (
            Stack(r"(?<=moe)\.input_linear\.weight$", both),
            Stack(r"(?<=moe)\.output_linear\.weight$", (".experts.{}.down_proj.weight",)),
        )

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_local_experts", 8), hf.size("num_experts_per_tok", 2)
        multiplier = hf.number("residual_multiplier", 1.0)
        return read_experts(hf, num_experts, top_k, is_normalized=True, scale=multiplier)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """With `shared_intermediate_size`, an expert that all tokens share."""

    renames = (*GraniteMoeForCausalLM.renames, (r"\.shared_mlp\.", ".mlp.shared_experts."))

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        both = (".shared_mlp.gate_proj.weight", ".shared_mlp.up_proj.weight")
        return (
            *super().stacks(config),
            Stack(r"\.shared_mlp\.input_linear\.weight$", both, num_experts=1),
            Stack(r"\.shared_mlp\.output_linear\.weight$", (".shared_mlp.down_proj.weight",), num_experts=1),
        )

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        shape, is_shared = super().experts_shape(hf, layer), hf.get("shared_intermediate_size", 1024) != 0
        if shape is None or not is_shared:
            return shape
        width = hf.size("shared_intermediate_size", 1024)
        return replace(shape, shared_width=width, shared_multiplier=hf.number("residual_multiplier", 1.0))

"""DBRX (Databricks 2024): layer norms without biases, clipped queries, keys and values, and experts in every layer."""

from dataclasses import replace
from typing import ClassVar

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import read_clip, read_routing, read_section
from quire.models.decoder.shapes import AttentionShape, QKVLayout
from quire.models.families.gpt.mpt import MptForCausalLM
from quire.models.layers.activation import activation_kind
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.norm import NormShape
from quire.models.weights.stacked import Stack


class DbrxForCausalLM(Decoder):
    """Half of the config is in its sections `attn_config` and `ffn_config`."""

    renames = (
        *MptForCausalLM.renames,
        (r"\.norm_attn_norm\.", "."),
        (r"\.mlp\.router\.layer\.", ".mlp.gate."),
        (r"\.mlp\.experts\.mlp\.", ".mlp.experts."),
    )
    fused: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}
    qkv_layout = QKVLayout.STACKED

    @classmethod
    def stacks(cls, config: ModelConfig) -> tuple[Stack, ...]:
        num_experts = read_section(config.hf_config, "ffn_config").size("moe_num_experts", 4)
        return tuple(
            Stack(
                rf"\.experts\.mlp\.{name}$", (f".experts.mlp.{{}}.{module}.weight",), False, name == "w2", num_experts
            )
            for name, module in (("w1", "gate_proj"), ("v1", "up_proj"), ("w2", "down_proj"))
        )

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        options = read_section(hf, "attn_config")
        values = {"num_key_value_heads": options.size("kv_n_heads", 1)}
        if options.get("rope_theta") is not None:
            values["rope_theta"] = options["rope_theta"]
        return replace(super().attention_shape(hf.replaced(values), layer), clip=read_clip(options))

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        options = read_section(hf, "ffn_config")
        if options.get("moe_normalize_expert_weights", 1.0) not in (None, 1.0):
            raise UnsupportedModelError(f"{options.source}: moe_normalize_expert_weights must be 1 or null")
        is_normalized = options.get("moe_normalize_expert_weights", 1.0) is not None
        num_experts, top_k = options.size("moe_num_experts", 4), options.size("moe_top_k", 1)
        kind = activation_kind(read_section(options, "ffn_act_fn"), "name", "silu")
        routing = read_routing(options, num_experts, top_k, is_normalized=is_normalized)
        return ExpertsShape(routing, options.size("ffn_hidden_size", 3584), kind)

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        return NormShape(1e-5, is_rms=False)

"""OLMoE (Muennighoff et al. 2024): Llama with norms of queries and keys, and many small experts."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.reading import read_clip, read_routing
from quire.models.decoder.shapes import AttentionShape, HeadNormShape, Span
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.activation import activation_kind
from quire.models.layers.experts import ExpertsShape


class OlmoeForCausalLM(LlamaForCausalLM):
    """The norms are over all heads of a token together."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        norm = HeadNormShape(cls.norm_shape(hf), Span.PROJECTION)
        return replace(super().attention_shape(hf, layer), head_norm=norm, clip=read_clip(hf))

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_experts", 64), hf.size("num_experts_per_tok", 8)
        routing = read_routing(hf, num_experts, top_k, is_normalized=hf.flag("norm_topk_prob", False))
        return ExpertsShape(routing, hf.size("intermediate_size"), activation_kind(hf, "hidden_act", "silu"))

"""OLMoE (Muennighoff et al. 2024) and FlexOlmo (Shi et al. 2025): OLMo with norms of queries and keys, and experts."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.reading import read_clip, read_experts
from quire.models.decoder.shapes import AttentionShape, Span
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.olmo import Olmo2ForCausalLM
from quire.models.layers.experts import ExpertsShape
from quire.models.layers.norm import NormShape


class OlmoeForCausalLM(LlamaForCausalLM):
    """The norms are over all heads of a token together."""

    has_head_norm = True
    head_norm_span = Span.PROJECTION

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), clip=read_clip(hf))

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_experts", 64), hf.size("num_experts_per_tok", 8)
        return read_experts(hf, num_experts, top_k, is_normalized=hf.flag("norm_topk_prob", False))


class FlexOlmoForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with the experts of OLMoE."""

    default_norm = NormShape(1e-6)

    @classmethod
    def experts_shape(cls, hf: HFConfig, layer: int) -> ExpertsShape | None:
        num_experts, top_k = hf.size("num_experts", 7), hf.size("num_experts_per_tok", 5)
        return read_experts(hf, num_experts, top_k, is_normalized=hf.flag("norm_topk_prob", False))

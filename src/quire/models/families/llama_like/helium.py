"""Helium (Kyutai 2025): Llama with heads that are rotated in pairs."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import AttentionShape
from quire.models.families.llama import LlamaForCausalLM


class HeliumForCausalLM(LlamaForCausalLM):
    """A bias, if there is any, is on queries, keys and values alone."""

    default_head_dim = 128
    has_interleaved_rope = True

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), o_bias=False)

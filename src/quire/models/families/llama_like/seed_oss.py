"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values, and its own flag for the output's."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import AttentionShape
from quire.models.families.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """A config without `head_dim` means 128."""

    default_head_dim = 128

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        qkv_bias, o_bias = hf.flag("attention_bias", True), hf.flag("attention_out_bias", False)
        return replace(super().attention_shape(hf, layer), qkv_bias=qkv_bias, o_bias=o_bias)

"""Seed-OSS (ByteDance 2025): Llama with biases on queries, keys and values, and its own flag for the output's."""

from quire.models.families.llama import LlamaForCausalLM


class SeedOssForCausalLM(LlamaForCausalLM):
    """A config without `head_dim` means 128."""

    default_head_dim = 128
    qkv_bias = ("attention_bias", True)
    o_bias = ("attention_out_bias", False)

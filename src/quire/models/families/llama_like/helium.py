"""Helium (Kyutai 2025): Llama with heads that are rotated in pairs."""

from quire.models.families.llama import LlamaForCausalLM


class HeliumForCausalLM(LlamaForCausalLM):
    """A bias, if there is any, is on queries, keys and values alone."""

    default_head_dim = 128
    has_interleaved_rope = True
    o_bias = False

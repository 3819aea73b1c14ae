"""Qwen3 (Yang et al. 2025): Qwen2 without its biases, with a norm over each query and key head."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.families.llama import DecoderShape, LlamaForCausalLM
from quire.models.families.qwen2 import layer_windows

_DEFAULT_HEAD_DIM = 128


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`head_dim` does not follow from the hidden size: a config without it means 128."""

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        hf = config.hf_config
        bias, head_dim = hf.flag("attention_bias", False), hf.size("head_dim", _DEFAULT_HEAD_DIM)
        shape = replace(DecoderShape.read(config), head_dim=head_dim, sliding_windows=layer_windows(hf))
        return replace(shape, qkv_bias=bias, o_bias=bias, qk_norm=True)

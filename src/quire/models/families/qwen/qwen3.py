"""Qwen3 (Yang et al. 2025): Qwen2 without its biases, with a norm over each query and key head."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import AttentionShape, HeadNormShape
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.qwen.qwen2 import layer_window

_DEFAULT_HEAD_DIM = 128


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`head_dim` does not follow from the hidden size: a config without it means 128."""

    default_head_dim = _DEFAULT_HEAD_DIM

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        norm = HeadNormShape(cls.norm_shape(hf))
        return replace(super().attention_shape(hf, layer), head_norm=norm, sliding_window=layer_window(hf, layer))

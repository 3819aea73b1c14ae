"""Qwen3 (Yang et al. 2025): Qwen2 without its biases, with a norm over each query and key head."""

from quire.config.hf_config import HFConfig
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.qwen.qwen2 import layer_window


class Qwen3ForCausalLM(LlamaForCausalLM):
    """`head_dim` does not follow from the hidden size: a config without it means 128."""

    default_head_dim = 128
    has_head_norm = True

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return layer_window(hf, layer)

"""Mistral (Jiang et al. 2023): Llama with a sliding window in every layer, or in none."""

from dataclasses import replace

from quire.config.model import ModelConfig
from quire.models.families.llama import DecoderShape, LlamaForCausalLM

_DEFAULT_WINDOW = 4096


class MistralForCausalLM(LlamaForCausalLM):
    """`sliding_window` is a number of positions, or null for full attention; a config without the key means 4096."""

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        hf = config.hf_config
        full = "sliding_window" in hf and hf["sliding_window"] is None
        window = None if full else hf.size("sliding_window", _DEFAULT_WINDOW)
        shape = DecoderShape.read(config)
        return replace(shape, sliding_windows=(window,) * len(shape.sliding_windows))

"""Mistral (Jiang et al. 2023): a sliding window in every layer, or in none."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.shapes import AttentionShape

_DEFAULT_WINDOW = 4096


class MistralForCausalLM(Decoder):
    """`sliding_window` is a number of positions, or null for full attention; a config without the key means 4096."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        is_full = "sliding_window" in hf and hf["sliding_window"] is None
        window = None if is_full else hf.size("sliding_window", _DEFAULT_WINDOW)
        return replace(super().attention_shape(hf, layer), sliding_window=window)

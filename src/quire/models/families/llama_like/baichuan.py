"""Baichuan and Baichuan 2 (Yang et al. 2023): Llama in 7B, with ALiBi in 13B, and a normalized head in 2."""

from dataclasses import replace
from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import alibi_slopes
from quire.models.decoder.shapes import AttentionShape, DecoderShape, QKVLayout
from quire.models.layers.rotary import RopeShape

_WIDTH_OF_7B = 4096
_VOCABULARY_OF_2 = 125_696


class BaichuanForCausalLM(Decoder):
    """The code of 13B reads its limit from `model_max_length`; that of version 2 has a `z_loss_weight`."""

    renames: ClassVar = ((r"^model\.", ""), (r"\.W_pack\.", ".qkv_proj."))
    fused: ClassVar = {"gate_up_proj": ("gate_proj", "up_proj")}
    qkv_layout = QKVLayout.STACKED

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        is_second = "z_loss_weight" in config.hf_config or config.vocab_size == _VOCABULARY_OF_2
        return replace(super().shape(config), is_tied=False, is_head_normalized=is_second)

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        attention = super().attention_shape(hf, layer)
        slopes = alibi_slopes(attention.num_heads) if attention.rope is None else None
        return replace(attention, slopes=slopes)

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        has_alibi = hf.get("model_max_length") is not None and hf.size("hidden_size") != _WIDTH_OF_7B
        return None if has_alibi else super().rope_shape(hf, layer, head_dim)

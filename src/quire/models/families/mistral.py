"""Mistral (Jiang et al. 2023) and Ministral: sliding windows in every layer, in some, or in none."""

from dataclasses import replace
from typing import ClassVar

from quire.common.errors import UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import SLIDING, layer_type
from quire.models.decoder.shapes import AttentionShape

_DEFAULT_WINDOW = 4096


class MistralForCausalLM(Decoder):
    """`sliding_window` is a number of positions, or null for full attention; a config without the key means 4096."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        is_full = "sliding_window" in hf and hf["sliding_window"] is None
        window = None if is_full else hf.size("sliding_window", _DEFAULT_WINDOW)
        return replace(super().attention_shape(hf, layer), sliding_window=window)


class Mistral3ForConditionalGeneration(MistralForCausalLM):
    """Mistral Small 3.1 and later, for text and images, of which the text model is loaded."""

    renames: ClassVar = ((r"^(model\.)?language_model\.", ""), (r"^model\.", ""))
    ignored: ClassVar = (*MistralForCausalLM.ignored, r"^(model\.)?(vision_tower|multi_modal_projector)\.")

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        rope = hf.section("rope_parameters") or HFConfig({}, hf.source)
        if rope.get("llama_4_scaling_beta"):
            raise UnsupportedModelError(f"{rope.source}: 'llama_4_scaling_beta' (Ministral 3) is not supported")
        return super().attention_shape(hf, layer)


class MinistralForCausalLM(Decoder):
    """`layer_types` names the layers with a window: by default all, if `sliding_window` is given."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        has_window = hf.get("sliding_window") is not None
        is_sliding = has_window and layer_type(hf, layer, lambda _: SLIDING) == SLIDING
        window = hf.size("sliding_window") if is_sliding else None
        return replace(super().attention_shape(hf, layer), sliding_window=window)

"""Mistral (Jiang et al. 2023) and Ministral (3 too): sliding windows in every layer, in some, or in none."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.config.model import rope_config
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import SLIDING, layer_type, read_window
from quire.models.layers.rotary import RopeShape

_DEFAULT_WINDOW = 4096


class MistralForCausalLM(Decoder):
    """`sliding_window` is a number of positions, or null for full attention; a config without the key means 4096."""

    default_window: ClassVar[int | None] = _DEFAULT_WINDOW

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return read_window(hf, cls.default_window)


class Ministral3ForCausalLM(MistralForCausalLM):
    """Queries are scaled by their position, if `rope_parameters` have a `llama_4_scaling_beta`."""

    default_window: ClassVar[int | None] = None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return RopeShape.read(rope_config(hf), head_dim, scales_queries=True)


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Mistral Small 3.1 and later, and Ministral 3, for text and images, of which the text model is loaded."""

    default_window: ClassVar[int | None] = _DEFAULT_WINDOW

    renames: ClassVar = ((r"^(model\.)?language_model\.", ""), (r"^model\.", ""))
    ignored: ClassVar = (*MistralForCausalLM.ignored, r"^(model\.)?(vision_tower|multi_modal_projector)\.")


class MinistralForCausalLM(Decoder):
    """`layer_types` names the layers with a window: by default all, if `sliding_window` is given."""

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        window = read_window(hf)
        return window if window and layer_type(hf, layer, lambda _: SLIDING) == SLIDING else None

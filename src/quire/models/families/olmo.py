"""OLMo (Groeneveld et al. 2024), OLMo 2 and OLMo 3."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import rope_config
from quire.models.decoder.reading import FULL, SLIDING, layer_type, read_clip
from quire.models.decoder.shapes import Arrangement, AttentionShape, Span
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape

_DEFAULT_WINDOW = 4096
_PERIOD = 4


class OlmoForCausalLM(LlamaForCausalLM):
    """Llama with layer norms that have no weights."""

    @classmethod
    def attention_shape(cls, hf: HFConfig, layer: int) -> AttentionShape:
        return replace(super().attention_shape(hf, layer), clip=read_clip(hf))

    @classmethod
    def norm_shape(cls, hf: HFConfig) -> NormShape:
        return NormShape(1e-5, is_rms=False, has_weight=False)


class Olmo2ForCausalLM(LlamaForCausalLM):
    """Norms of what attention and MLP give, and of all queries and all keys of a token."""

    default_norm = NormShape(1e-5)
    arrangement = Arrangement.OUTPUT_NORM
    has_head_norm = True
    head_norm_span = Span.PROJECTION


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 with sliding windows in three of four layers, which are not stretched beyond the trained length."""

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return hf.size("sliding_window", _DEFAULT_WINDOW) if cls._layer_type(hf, layer) == SLIDING else None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return RopeShape.read(rope_config(hf, cls._layer_type(hf, layer)), head_dim)

    @classmethod
    def _layer_type(cls, hf: HFConfig, layer: int) -> str:
        return layer_type(hf, layer, lambda i: SLIDING if (i + 1) % _PERIOD else FULL)

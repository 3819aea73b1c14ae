"""Command R (Cohere 2024) and Command R7B: attention and MLP read one layer norm, heads are rotated in pairs."""

from dataclasses import replace

from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.decoder.reading import FULL, SLIDING, layer_type
from quire.models.decoder.shapes import Arrangement, DecoderShape, Span
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.norm import NormShape
from quire.models.layers.rotary import RopeShape

_WINDOW = 4096
_PERIOD = 4
_LOGIT_SCALE = 0.0625


class CohereForCausalLM(LlamaForCausalLM):
    """Logits are multiplied by `logit_scale`."""

    ties_by_default = True
    has_interleaved_rope = True
    default_norm = NormShape(1e-5, is_rms=False)
    arrangement = Arrangement.PARALLEL
    has_head_norm = ("use_qk_norm", False)
    head_norm_span = Span.EACH_HEAD

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        return replace(super().shape(config), logit_multiplier=config.hf_config.number("logit_scale", _LOGIT_SCALE))


class Cohere2ForCausalLM(CohereForCausalLM):
    """Three of four layers have a window, and the fourth no rotary embedding."""

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return hf.size("sliding_window", _WINDOW) if _is_sliding(hf, layer) else None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return super().rope_shape(hf, layer, head_dim) if _is_sliding(hf, layer) else None


def _is_sliding(hf: HFConfig, layer: int) -> bool:
    period = hf.size("sliding_window_pattern", _PERIOD)
    return layer_type(hf, layer, lambda i: SLIDING if (i + 1) % period else FULL) == SLIDING

"""Qwen2, 2.5 (Yang et al. 2024), MiMo-7B (Xiaomi 2025): biases on queries, keys and values, and windows by layer."""

from typing import ClassVar

from quire.config.hf_config import HFConfig
from quire.models.decoder.model import Decoder
from quire.models.decoder.reading import FULL, SLIDING, Setting, layer_type

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


class Qwen2ForCausalLM(Decoder):
    """The biases are there whatever the config says."""

    qkv_bias: ClassVar[Setting] = True

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        return layer_window(hf, layer)


def layer_window(hf: HFConfig, layer: int, *, by_default: bool = False) -> int | None:
    """The layer's sliding window: by `layer_types`, else from layer `max_window_layers` on; none unless enabled.
    `by_default`: whether a config without `use_sliding_window` enables it."""
    has_window = hf.get("sliding_window", _DEFAULT_WINDOW) is not None
    if not has_window or not hf.flag("use_sliding_window", by_default):
        return None
    first = hf.get("max_window_layers")
    first = first if isinstance(first, int) else _DEFAULT_FULL_LAYERS
    is_sliding = layer_type(hf, layer, lambda i: SLIDING if i >= first else FULL) == SLIDING
    return hf.size("sliding_window", _DEFAULT_WINDOW) if is_sliding else None

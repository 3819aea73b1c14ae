"""Qwen2 and 2.5 (Yang et al. 2024): Llama with biases on queries, keys and values, and sliding windows by layer."""

from dataclasses import replace

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.models.families.llama import DecoderShape, LlamaForCausalLM

_DEFAULT_WINDOW = 4096
_DEFAULT_FULL_LAYERS = 28


class Qwen2ForCausalLM(LlamaForCausalLM):
    """The biases are there whatever the config says."""

    @classmethod
    def shape(cls, config: ModelConfig) -> DecoderShape:
        return replace(DecoderShape.read(config), qkv_bias=True, sliding_windows=layer_windows(config.hf_config))


def layer_windows(hf: HFConfig) -> tuple[int | None, ...]:
    """Each layer's sliding window: by `layer_types`, else from layer `max_window_layers` on; none unless enabled."""
    num_layers = hf.size("num_hidden_layers")
    if not hf.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = hf.size("sliding_window", _DEFAULT_WINDOW)
    first = hf.get("max_window_layers")
    first = first if isinstance(first, int) else _DEFAULT_FULL_LAYERS
    default = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    layer_types = hf.get("layer_types") or default
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise CheckpointError(f"{hf.source}: 'layer_types' must be a list of {num_layers} names, one per layer")
    windows = {"full_attention": None, "sliding_attention": window}
    if unknown := [name for name in map(str, layer_types) if name not in windows]:
        raise UnsupportedModelError(f"{hf.source}: layer_types {unknown}: supported are {', '.join(windows)}")
    return tuple(windows[name] for name in layer_types)

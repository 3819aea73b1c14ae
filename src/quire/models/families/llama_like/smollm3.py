"""SmolLM3 (Bakouch et al. 2025): Llama without a rotary embedding in every fourth layer (NoPE)."""

from quire.common.errors import CheckpointError
from quire.config.hf_config import HFConfig
from quire.models.decoder.reading import FULL, SLIDING, layer_type, read_window
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.rotary import RopeShape

_DEFAULT_INTERVAL = 4
_DEFAULT_TYPES = {True: FULL, False: SLIDING}
"""Whether a layer has a rotary embedding -> what it sees."""


class SmolLM3ForCausalLM(LlamaForCausalLM):
    """With `use_sliding_window`, layers without a rotary embedding have a window."""

    ties_by_default = True

    @classmethod
    def window(cls, hf: HFConfig, layer: int) -> int | None:
        is_enabled = hf.flag("use_sliding_window", False)
        is_sliding = is_enabled and layer_type(hf, layer, lambda i: _DEFAULT_TYPES[_is_rotated(hf, i)]) == SLIDING
        return read_window(hf) if is_sliding else None

    @classmethod
    def rope_shape(cls, hf: HFConfig, layer: int, head_dim: int) -> RopeShape | None:
        return super().rope_shape(hf, layer, head_dim) if _is_rotated(hf, layer) else None


def _is_rotated(hf: HFConfig, layer: int) -> bool:
    """By the list `no_rope_layers`, in which 0 means none; or all but every `no_rope_layer_interval`th."""
    interval, num_layers = hf.size("no_rope_layer_interval", _DEFAULT_INTERVAL), hf.size("num_hidden_layers")
    flags = hf.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(num_layers)]
    if not isinstance(flags, list) or len(flags) != num_layers or any(flag not in (0, 1) for flag in flags):
        raise CheckpointError(f"{hf.source}: 'no_rope_layers' must be a list of {num_layers} flags, 0 or 1")
    return bool(flags[layer])

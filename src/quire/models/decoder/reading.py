"""What many families read from their configs in the same way."""

from collections.abc import Callable, Sequence
from typing import Any

from quire import kernels
from quire.common.errors import CheckpointError, KernelError
from quire.config.checkpoint.hf_names import LAYER_TYPES
from quire.config.hf_config import HFConfig
from quire.models.decoder.shapes import LayerShape
from quire.models.layers.activation import activation_kind
from quire.models.layers.experts import ExpertsShape
from quire.models.weights.stacked import Stack

_MAX_EXPERTS = 65536
_MAX_PREDICTION_LAYERS = 64
FULL, SLIDING = LAYER_TYPES
Setting = bool | tuple[str, bool]
"""True or False in all models of a family, or the config's key for it and the value of a config without the key."""


def read_setting(hf: HFConfig, setting: Setting) -> bool:
    """The value for this config."""
    return setting if isinstance(setting, bool) else hf.flag(*setting)


def read_heads(hf: HFConfig, head_dim: int | None = None) -> tuple[int, int, int]:
    """num_heads, num_kv_heads and head_dim. `head_dim` is that of a config without the key; None: hidden_size divided
    by the number of heads. Raises CheckpointError if these do not fit together."""
    hidden_size, num_heads = hf.size("hidden_size"), hf.size("num_attention_heads")
    num_kv_heads = hf.size("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointError(
            f"{hf.source}: {num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly"
        )
    if hf.get("head_dim") is None and head_dim is None and hidden_size % num_heads:
        raise CheckpointError(f"{hf.source}: hidden_size {hidden_size} is not a multiple of {num_heads} heads")
    return num_heads, num_kv_heads, hf.size("head_dim", head_dim or hidden_size // num_heads)


def read_window(hf: HFConfig, default: int | None = None) -> int | None:
    """The config's `sliding_window`, null for None; `default` in a config without the key."""
    window = hf.get("sliding_window", default)
    return None if window is None else hf.size("sliding_window", window)


def read_cap(hf: HFConfig, key: str, default: float | None) -> float | None:
    """A soft cap, null for None; `default` in a config without the key."""
    cap = hf.get(key, default)
    return None if cap is None else hf.number(key, cap)


def read_section(hf: HFConfig, key: str) -> HFConfig:
    """An object inside the config, empty where the key is absent or null."""
    return hf.section(key) or HFConfig({}, f"{hf.source}: {key}")


def read_clip(hf: HFConfig) -> float | None:
    """The largest magnitude of queries, keys and values; None if there is none."""
    return None if hf.get("clip_qkv") is None else hf.number("clip_qkv")


def alibi_slopes(num_heads: int, max_bias: float = 8.0) -> tuple[float, ...]:
    """The slope of each head (Press et al. 2022): a geometric sequence for a power of two; for other numbers that of
    the power below, and then every other slope of twice as many heads."""
    power = 2 ** (num_heads.bit_length() - 1)
    slopes = [2 ** (-max_bias * i / power) for i in range(1, power + 1)]
    slopes += [2 ** (-max_bias * i / (2 * power)) for i in range(1, 2 * power, 2)]
    return tuple(slopes[:num_heads])


def layer_type(hf: HFConfig, layer: int, default: Callable[[int], str]) -> str:
    """FULL or SLIDING: what `layer_types` says of a layer, or `default` in a config without it."""
    num_layers = hf.size("num_hidden_layers")
    types = hf.get("layer_types") or [default(i) for i in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise CheckpointError(f"{hf.source}: 'layer_types' must be a list of {num_layers} names, one per layer")
    return str(types[layer])


def read_routing(hf: HFConfig, num_experts: int, top_k: int, **how: Any) -> kernels.Routing:
    """The Routing. Raises CheckpointError if its numbers do not fit together."""
    try:
        return kernels.Routing(top_k, num_experts, **how)
    except KernelError as error:
        raise CheckpointError(f"{hf.source}: {error}") from error


def read_experts(
    hf: HFConfig, num_experts: int, top_k: int, *, width: str = "intermediate_size", **how: Any
) -> ExpertsShape:
    """Experts without biases, whose width is under the key `width`. Raises as read_routing."""
    routing = read_routing(hf, num_experts, top_k, **how)
    return ExpertsShape(routing, hf.size(width), activation_kind(hf, "hidden_act", "silu"))


def check_experts(hf: HFConfig, layers: Sequence[LayerShape]) -> None:
    """Raise CheckpointError if making the modules of its experts would take minutes."""
    total = sum(layer.mlp.routing.num_experts for layer in layers if isinstance(layer.mlp, ExpertsShape))
    if total > _MAX_EXPERTS:
        raise CheckpointError(f"{hf.source}: its layers have {total} experts, more than {_MAX_EXPERTS}")


def prediction_layer(hf: HFConfig) -> Stack:
    """Leaves out the layers behind the last one, which predict further tokens: a draft head reads the first of them.
    Raises CheckpointError for more of them than any model has."""
    first, number = hf.size("num_hidden_layers"), max(1, hf.count("num_nextn_predict_layers", 1))
    if number > _MAX_PREDICTION_LAYERS:
        raise CheckpointError(
            f"{hf.source}: 'num_nextn_predict_layers' is {number}, more than {_MAX_PREDICTION_LAYERS}"
        )
    return Stack(rf"^model\.layers\.({'|'.join(str(first + i) for i in range(number))})\.", ())


def layer_indices(hf: HFConfig, key: str) -> list[int]:
    """A list of layers, empty in a config without it. Raises CheckpointError if it is something else."""
    layers = hf.get(key) or []
    if not isinstance(layers, list) or not all(type(layer) is int for layer in layers):
        raise CheckpointError(f"{hf.source}: {key!r} must be a list of layers' numbers")
    return layers

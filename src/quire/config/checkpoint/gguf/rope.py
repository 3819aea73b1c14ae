"""The rotary embedding that a GGUF header describes, as config.json has it."""

import math
import struct
from typing import Any

from quire.common.errors import CheckpointError
from quire.config.checkpoint.gguf.architectures import ROPE_TABLES, Architecture
from quire.config.checkpoint.gguf.files import GGUFModel
from quire.config.checkpoint.gguf.keys import Keys
from quire.config.checkpoint.tensors import MappedTensor

FULL, SLIDING = "full_attention", "sliding_attention"


def rope_parameters(keys: Keys, model: GGUFModel, architecture: Architecture, head_dim: int) -> dict[str, Any]:
    """The parameters of all layers; or those of layers with a window and of others, if these differ. Raises
    UnsupportedModelError for a scaling that Quire does not compute."""
    rotary_dim = keys.size("rope.dimension_count", head_dim)
    if architecture.pairs and rotary_dim != head_dim:
        raise keys.unsupported("rope.dimension_count", f"must equal the head's size, {head_dim}")
    common: dict[str, Any] = {"partial_rotary_factor": share_of(rotary_dim, head_dim), "rope_type": "default"}
    theta = keys.number("rope.freq_base", 10000.0)
    full = common | {"rope_theta": theta} | _scaled(keys, model, architecture, rotary_dim)
    if not architecture.rotates_windows_apart:
        return full
    base = keys.number("rope.freq_base_swa", architecture.window_rope_base or theta)
    return {FULL: full, SLIDING: common | {"rope_theta": base}}


def share_of(rotary_dim: int, head_dim: int) -> float:
    """The share of a head that is rotated, such that its product with the size is no less than `rotary_dim`."""
    share = rotary_dim / head_dim
    return share if int(head_dim * share) == rotary_dim else math.nextafter(share, math.inf)


def _scaled(keys: Keys, model: GGUFModel, architecture: Architecture, rotary_dim: int) -> dict[str, Any]:
    """What differs from the plain embedding."""
    scaling = keys.get("rope.scaling.type") or "linear"
    factor = keys.get("rope.scaling.factor") or keys.get("rope.scale_linear") or 1.0
    original = keys.size("rope.scaling.original_context_length", keys.size("context_length"))
    if tables := {name: model.tensors[name] for name in ROPE_TABLES if name in model.tensors}:
        if scaling not in ("none", "linear", "longrope") or (scaling != "longrope" and factor != 1.0):
            raise keys.unsupported("rope.scaling.type", f"together with {', '.join(tables)} this is not supported")
        return {**_divided(model, tables, rotary_dim), "original_max_position_embeddings": original,
                "attention_factor": keys.number("rope.scaling.attn_factor", 1.0)}  # fmt: skip
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return {}
    if scaling == "linear":
        return {"rope_type": "linear", "factor": factor}
    if scaling != "yarn":
        raise keys.unsupported("rope.scaling.type", "supported are none, linear, yarn, and longrope with its tables")
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original,
            **architecture.rope, **_yarn(keys)}  # fmt: skip


def _yarn(keys: Keys) -> dict[str, Any]:
    names = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
    for key in ("attn_factor", "yarn_ext_factor"):
        if keys.get(f"rope.scaling.{key}") not in (None, 1.0):
            raise keys.unsupported(f"rope.scaling.{key}", "only 1 is supported")
    if keys.get("rope.scaling.yarn_log_multiplier"):
        raise keys.unsupported("rope.scaling.yarn_log_multiplier", "not supported")
    stated = {ours: f"rope.scaling.{theirs}" for ours, theirs in names.items()}
    return {ours: keys.number(key) for ours, key in stated.items() if keys.get(key) is not None}


def _divided(model: GGUFModel, tables: dict[str, MappedTensor], rotary_dim: int) -> dict[str, Any]:
    """Frequencies divided by the numbers of a table: one table for every length (Llama 3.1), or a long and a short one.

    `longrope` divides in the same way; with its two lists equal, the length of the sequence makes no difference.
    """
    single = tables.get("rope_freqs.weight")
    long, short = (tables.get(f"rope_factors_{kind}.weight", single) for kind in ("long", "short"))
    if long is None or short is None:
        raise CheckpointError(f"{model.metadata.source} has {', '.join(tables)} alone: the other table is missing")
    return {
        "rope_type": "longrope",
        "long_factor": _floats(long, rotary_dim // 2),
        "short_factor": _floats(short, rotary_dim // 2),
    }


def _floats(tensor: MappedTensor, length: int) -> list[float]:
    if tensor.dtype != "float32" or tensor.shape != (length,):
        raise CheckpointError(
            f"{tensor.path}: {tensor.name!r} must be float32 [{length}], not {tensor.dtype} {list(tensor.shape)}"
        )
    with tensor.path.open("rb") as file:
        file.seek(tensor.offset)
        return list(struct.unpack(f"<{length}f", file.read(tensor.num_bytes)))

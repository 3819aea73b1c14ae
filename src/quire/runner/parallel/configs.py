"""The configs of an engine as bytes, from which only configs can be made."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from quire.config.args import EngineConfig
from quire.config.cache import CacheConfig
from quire.config.checkpoint.draft_heads import HeadConfig, HeadFormat
from quire.config.checkpoint.runners import PoolerConfig
from quire.config.hf_config import HFConfig
from quire.config.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    LatentSpec,
    NoCacheSpec,
    SlidingWindowSpec,
)
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.parallel import ParallelConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig

_DATACLASSES: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        EngineConfig, ModelConfig, CacheConfig, SchedulerConfig, ParallelConfig, LoRAConfig, SpeculativeConfig,
        HeadConfig, HeadFormat, PoolerConfig, KVCacheConfig, KVCacheGroup, FullAttentionSpec, SlidingWindowSpec,
        LatentSpec, NoCacheSpec,
    )
}  # fmt: skip
_OTHERS: dict[str, Callable[..., Any]] = {
    "tuple": lambda *items: items,
    "list": lambda *items: list(items),
    "frozenset": lambda *items: frozenset(items),
    "dict": lambda *pairs: dict(pairs),
    "path": Path,
    "HFConfig": HFConfig,
}


def to_bytes(*configs: object) -> bytes:
    """Encode configs. Raises TypeError for what none of them has."""
    return msgspec.msgpack.encode(_plain(configs))


def from_bytes(data: bytes) -> Any:
    """The configs that `to_bytes` encoded, as a tuple. Raises ValueError for anything else."""
    return _made(msgspec.msgpack.decode(data))


def _plain(value: Any) -> Any:
    """Plain values as they are, all others as a list of what they are and what they are made of."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    name = type(value).__name__
    if type(value) is _DATACLASSES.get(name):
        return [name, *(_plain(getattr(value, field.name)) for field in dataclasses.fields(value))]
    if isinstance(value, Path):
        return ["path", str(value)]
    if isinstance(value, HFConfig):
        return ["HFConfig", _plain(dict(value)), value.source]
    if type(value) is dict:
        return ["dict", *(_plain(pair) for pair in value.items())]
    if type(value) in (tuple, list, frozenset):
        return [name, *map(_plain, value)]
    raise TypeError(f"a config has a {name}")


def _made(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    make = _DATACLASSES.get(value[0]) or _OTHERS.get(value[0])
    if make is None:
        raise ValueError(f"{value[0]!r} is no part of a config")
    return make(*map(_made, value[1:]))

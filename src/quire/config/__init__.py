"""Frozen value objects that configure an engine: model, cache, scheduler, parallelism."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config.args import EngineConfig as VllmConfig
    from quire.config.checkpoint.runners import PoolerConfig

__all__ = ["PoolerConfig", "VllmConfig"]


def __getattr__(name: str) -> Any:
    """Import PoolerConfig, and EngineConfig under vLLM's name, on first use."""
    if name == "PoolerConfig":
        from quire.config.checkpoint.runners import PoolerConfig

        return PoolerConfig
    if name != "VllmConfig":
        raise AttributeError(f"module 'quire.config' has no attribute {name!r}")
    from quire.config.args import EngineConfig

    return EngineConfig

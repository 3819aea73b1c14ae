"""Finds the class that runs an architecture. A model's module is imported when it is asked for."""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS, unsupported
from quire.config.model import ModelConfig

if TYPE_CHECKING:
    from quire.models.base import Model


def class_of(config: ModelConfig) -> "type[Model]":
    """The class that runs a checkpoint, converted for pooling if the config says so. Raises UnsupportedModelError."""
    model = model_class(config.architecture, config.model_impl)
    if config.convert == "none":
        return model
    from quire.models.pooling.convert import pooling_class

    return pooling_class(model, config.convert)


def model_class(architecture: str, model_impl: str = "quire") -> "type[Model]":
    """The class for `architecture`. Raises UnsupportedModelError, which names the supported ones."""
    if model_impl == "transformers":
        from quire.models.fallback.model import TransformersCausalLM

        return TransformersCausalLM
    path = MODELS.get(architecture) or POOLING_MODELS.get(architecture)
    if path is None:
        raise unsupported(architecture)
    module, name, *kind = path.split(":")
    model: type[Model] = getattr(importlib.import_module(module), name)
    if not kind:
        return model
    from quire.models.pooling.model import Kind, pooled

    return pooled(model, Kind[kind[0]])


def described_models() -> Iterator[tuple[str, str]]:
    """Every architecture, and the first line of its module: which models it is, and how they differ from others."""
    for architecture, path in (MODELS | POOLING_MODELS).items():
        module = importlib.import_module(path.partition(":")[0])
        yield architecture, (module.__doc__ or "").partition("\n")[0].removesuffix(".")

"""Finds the class that runs an architecture. A model's module is imported when it is asked for."""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.config.checkpoint.architectures import MODELS, unsupported

if TYPE_CHECKING:
    from quire.models.base import Model


def model_class(architecture: str, model_impl: str = "quire") -> "type[Model]":
    """The class for `architecture`. Raises UnsupportedModelError, which names the supported ones."""
    if model_impl == "transformers":
        from quire.models.fallback.model import TransformersCausalLM

        return TransformersCausalLM
    if architecture not in MODELS:
        raise unsupported(architecture)
    module, name = MODELS[architecture].split(":")
    model: type[Model] = getattr(importlib.import_module(module), name)
    return model


def described_models() -> Iterator[tuple[str, str]]:
    """Every architecture, and the first line of its module: which models it is, and how they differ from others."""
    for architecture, path in MODELS.items():
        module = importlib.import_module(path.partition(":")[0])
        yield architecture, (module.__doc__ or "").partition("\n")[0].removesuffix(".")

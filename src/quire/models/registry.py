"""Which class runs which architecture. A model's module is imported when it is asked for."""

import importlib
from typing import TYPE_CHECKING

from quire.common.errors import UnsupportedModelError, nearest_name

if TYPE_CHECKING:
    from quire.models.base import Model

_MODELS = {
    "LlamaForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "LLaMAForCausalLM": "quire.models.families.llama:LlamaForCausalLM",
    "MistralForCausalLM": "quire.models.families.mistral:MistralForCausalLM",
    "OPTForCausalLM": "quire.models.families.opt:OPTForCausalLM",
    "Qwen2ForCausalLM": "quire.models.families.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "quire.models.families.qwen3:Qwen3ForCausalLM",
}


def supported_architectures() -> list[str]:
    """Names as in a config.json's `architectures`."""
    return sorted(_MODELS)


def model_class(architecture: str) -> "type[Model]":
    """The class for `architecture`. Raises UnsupportedModelError, which names the supported ones."""
    if architecture not in _MODELS:
        raise UnsupportedModelError(
            f"no model for architecture {architecture!r}{nearest_name(architecture, _MODELS)} "
            f"(supported: {', '.join(supported_architectures())}; a checkpoint's own Python code is never run)"
        )
    module, name = _MODELS[architecture].split(":")
    model: type[Model] = getattr(importlib.import_module(module), name)
    return model

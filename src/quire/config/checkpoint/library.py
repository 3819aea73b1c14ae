"""The library transformers as an implementation of models: which of its classes runs a checkpoint, with what values.

It is imported when a checkpoint needs it, and only its own classes are used, never code of a checkpoint.
"""

import re
from typing import Any

from quire.common.errors import ConfigError, UnsupportedModelError, check_choice
from quire.config.checkpoint.architectures import supported_architecture
from quire.config.checkpoint.hf_names import standard_names
from quire.config.hf_config import HFConfig

MODEL_IMPLS = ("auto", "quire", "transformers")
INSTALL = "pip install 'quire[transformers]'"
_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
_NOT_VALUES = re.compile("^auto_map$|^quantization_config$|implementation")
"""Keys that would choose code, or what Quire does itself."""
_MOVING_ROPE = {"dynamic", "longrope"}
"""The types whose frequencies transformers derives from the longest sequence of a batch."""


def implementation(hf: HFConfig, model_impl: str) -> tuple[str, str, HFConfig]:
    """The architecture that a config.json names, which implementation runs it (`quire` or `transformers`), and the
    config that this one reads.

    Raises UnsupportedModelError if the wanted implementation does not have the architecture, ConfigError for an unknown
    `model_impl` or if transformers is wanted and not installed, and CheckpointError if the config is malformed.
    """
    wanted = check_choice("model_impl", model_impl, (*MODEL_IMPLS, "vllm"))  # `vllm` is vLLM's word for its own models
    if wanted == "transformers":
        return _library_architecture(hf), wanted, _with_sizes(hf)
    try:
        architecture = supported_architecture(hf)
    except UnsupportedModelError as error:
        if wanted != "auto":
            raise UnsupportedModelError(f"{error}; model_impl='auto' also tries transformers' modules") from error
        try:
            architecture = _library_architecture(hf)
        except (ConfigError, UnsupportedModelError) as reason:
            raise UnsupportedModelError(f"{error}; {str(reason).removeprefix(f'{hf.source}: ')}") from error
        return architecture, "transformers", _with_sizes(hf)
    return architecture, "quire", standard_names(hf)


def library_class(hf: HFConfig) -> Any:
    """The class of transformers that a config.json names, a PreTrainedModel for causal language modeling, or None.

    It must be the one that the library has for the config's `model_type`. Raises ConfigError if the library is missing.
    """
    library = _library()
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named, model_type = hf.get("architectures"), hf.get("model_type")
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    return getattr(library, name) if name is not None and named == [name] else None


def library_config(hf: HFConfig) -> Any:
    """The library's config of the `model_type` in `hf`. Raises UnsupportedModelError if the library refuses it."""
    _library()
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = {key: value for key, value in hf.items() if not _NOT_VALUES.search(key)}
    try:
        return CONFIG_MAPPING[hf.text("model_type")](**values)
    except Exception as error:  # each class of the library checks its values in its own way
        message = " ".join(str(error).split())
        raise UnsupportedModelError(f"{hf.source}: transformers refuses it: {message}") from error


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(f"other architectures run through transformers, which is missing: {INSTALL}") from error
    return transformers


def _library_architecture(hf: HFConfig) -> str:
    kind = library_class(hf)
    if kind is None:
        raise UnsupportedModelError(
            f"{hf.source}: transformers {_library().__version__} has no causal language model "
            f"{str(hf.get('architectures'))[:80]} of model_type {str(hf.get('model_type'))[:80]!r}"
        )
    if kind._is_stateful:  # said before sizes are looked for, which such models need not have
        raise UnsupportedModelError(
            f"{hf.source}: transformers' {kind.__name__} keeps other states than keys and values, such as those of "
            "state-space models and linear attention, which Quire does not have"
        )
    return str(kind.__name__)


def _is_nested(config: Any) -> bool:
    try:
        return config.get_text_config() is not config
    except ValueError:  # the library finds several text models in it
        return True


def _with_sizes(hf: HFConfig) -> HFConfig:
    """The same values, and those that every model has, under their usual names."""
    config = library_config(hf)
    if _is_nested(config):
        raise UnsupportedModelError(f"{hf.source}: a nested config is not supported through transformers")
    rope = getattr(config, "rope_parameters", None) or {}
    types = [section.get("rope_type") for section in (rope, *rope.values()) if isinstance(section, dict)]
    if found := [name for name in types if name in _MOVING_ROPE]:
        raise UnsupportedModelError(
            f"{hf.source}: rope_type {found[0]} is not supported through transformers, where keys would depend on the "
            "other sequences of a batch"
        )
    sizes = {name: getattr(config, name, None) for name in (*_SIZES, "eos_token_id")}
    return HFConfig({**hf, **{name: value for name, value in sizes.items() if value is not None}}, hf.source)

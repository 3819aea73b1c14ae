"""Finds the class that runs an architecture. A model's module is imported when it is asked for."""

import importlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config.checkpoint import architectures
from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS, unsupported
from quire.config.model import ModelConfig

if TYPE_CHECKING:
    from quire.models.base import Model


def class_of(config: ModelConfig) -> "type[Model]":
    """The class that runs a checkpoint, converted for pooling if the config says so. Raises UnsupportedModelError."""
    model = model_class(config.architecture, config.model_impl)
    if config.head is not None:
        from quire.models.heads.head import head_class

        return head_class(config.head.format, model)
    if config.convert == "none":
        return model
    from quire.models.pooling.model import pooling_class

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


@dataclass(frozen=True, slots=True)
class ModelKind:
    """What is alike for many architectures."""

    name: str
    formats: str
    """Of weights."""
    share: str
    """How much of the machine's limit was measured, and with what."""


_OWN = "float32, bfloat16, int8, int4"
_STORED = f"{_OWN}; GGUF, GPTQ, AWQ, compressed-tensors, FP8, MXFP4"
_DENSE_SHARE = "bfloat16 0.92 to 1.00, int8 0.89 to 0.93: one prompt, `python -m benchmarks throughput`"
_DENSE = ModelKind("dense", _STORED, _DENSE_SHARE)
_ENCODER = "bfloat16 0.66 to 0.68, int8 0.5 to 0.54 (AMX 0.14, 0.07): 256 texts, `python -m benchmarks embeddings`"
_KINDS = {
    "mixtures": ModelKind("mixture", _STORED, "int4 0.78 to 0.9: one prompt, `python -m benchmarks mixture`"),
    "latent": ModelKind(
        "latent",
        f"{_STORED}; `kv_b_proj` plain",
        "attention, without AMX: bfloat16 0.56 to 0.71 (eight prompts 0.6 to 0.74), float32 0.27 to 0.69; with AMX: "
        "bfloat16 0.45 to 0.53; `quire bench attention`",
    ),
    "encoders": ModelKind("encoder", _OWN, _ENCODER),
}
"""By the folder of `quire.models.families`. All others are dense."""


VARIANTS_FILE = Path(architectures.__file__).with_name("tested_variants.json")
"""By architecture: the small models that tests compare with transformers'. `python -m tools.models_table` writes it."""


def described_models() -> Iterator[tuple[str, str, ModelKind, Sequence[str]]]:
    """Every architecture, the first line of its module (which models it is, and how they differ from others), its kind,
    and the variants of it that are tested."""
    tested = json.loads(VARIANTS_FILE.read_text(encoding="utf-8"))
    for architecture, path in (MODELS | POOLING_MODELS).items():
        module = importlib.import_module(path.partition(":")[0])
        kind = _KINDS.get(module.__name__.split(".")[3], _DENSE)
        text = (module.__doc__ or "").partition("\n")[0].removesuffix(".")
        yield architecture, text, kind, tested.get(architecture, ())

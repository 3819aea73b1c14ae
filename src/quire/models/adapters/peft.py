"""Adapters as PEFT saves them: a folder of `adapter_config.json` and `adapter_model.safetensors`."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping
from hashlib import blake2b
from os.path import isfile
from pathlib import Path

import torch
from torch import Tensor

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.safetensors import read_header
from quire.config.checkpoint.tensors import MappedCheckpoint, TensorInfo
from quire.config.model import ModelConfig
from quire.kernels.backends.reference_backend import TorchThreads
from quire.models.adapters.adapter import Adapter, AdapterInfo, AdapterModule, adapter_bytes, projections
from quire.models.adapters.peft_config import PeftConfig
from quire.models.base import Model
from quire.models.weights.loader import reading, whole_model

WEIGHTS_FILE = "adapter_model.safetensors"

_PICKLE = "adapter_model.bin"
_TENSOR = re.compile(r"(base_model\.model\.)?(?P<module>.{1,300})\.lora_(?P<factor>[AB])(\.default)?\.weight")
_DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclasses.dataclass(frozen=True, slots=True)
class _Stored:
    """A module's two tensors in the file."""

    peft_name: str
    """The module's name in the base model, which patterns match."""
    a: TensorInfo
    b: TensorInfo
    scale: float


def read_adapter(folder: Path, model: Model, max_rank: int) -> Adapter:
    """The adapter in `folder`, for this model. Everything is checked, and all bytes are read once, for the digest.

    Raises UnsupportedModelError for what Quire does not compute, and CheckpointError if a file is missing or malformed,
    if the adapter does not fit the model, if a rank is above `max_rank`, or if a number is not finite.
    """
    config = PeftConfig.read(folder)
    if not isfile(folder / WEIGHTS_FILE):
        pickled = isfile(folder / _PICKLE)
        why = f"its weights in {_PICKLE}, a format that can run code" if pickled else f"no {WEIGHTS_FILE}"
        raise CheckpointError(f"{folder} has {why}: save the adapter with PEFT's save_pretrained, as safetensors")
    checkpoint = MappedCheckpoint(read_header(folder / WEIGHTS_FILE))
    stored = _modules(folder, config, model, checkpoint.tensors)
    _check_fit(folder, stored, _sizes(model), max_rank)
    dtypes = {name: layer.dtype for layer, names in projections(model) for name in names}
    digest = blake2b(digest_size=16)
    with TorchThreads(1):
        modules = {name: _read(folder, checkpoint, name, stored[name], dtypes[name], digest) for name in sorted(stored)}
    ranks = {name: len(module.a) for name, module in modules.items()}
    return Adapter(
        digest.hexdigest(), adapter_bytes(model, ranks), max(ranks.values()), config.base_model_name, modules
    )


def inspect_adapter(folder: Path, config: ModelConfig, max_rank: int) -> AdapterInfo:
    """What `read_adapter` finds out and checks, for a process that has no model. Raises the same errors."""
    model = whole_model(config)
    adapter = read_adapter(folder, model, max_rank)
    return AdapterInfo(adapter.digest, adapter.num_bytes, adapter.rank, adapter.base_model_name)


def _sizes(model: Model) -> dict[str, tuple[int, int]]:
    """The outputs and inputs of each module that can have an adapter."""
    return {
        name: (part.size[0], part.size[1])
        for layer, names in projections(model)
        for name, part in zip(names, layer.parts, strict=True)
    }


def _modules(folder: Path, config: PeftConfig, model: Model, tensors: Mapping[str, TensorInfo]) -> dict[str, _Stored]:
    """The tensors of each module, by the model's name of it."""
    pairs: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, info in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedModelError(
                f"{folder}: tensor {name[:120]!r} is no lora_A or lora_B weight; others are not supported"
            )
        if pairs[match["module"]].setdefault(match["factor"], info) is not info:
            raise CheckpointError(f"{folder}: {name[:120]!r} is there twice, with and without '.default'")
        if info.dtype not in _DTYPES:
            raise CheckpointError(f"{folder}: {name[:120]!r} is {info.dtype}, allowed are {', '.join(_DTYPES)}")
    if not pairs:
        raise CheckpointError(f"{folder}: {WEIGHTS_FILE} has no tensors")
    found: dict[str, _Stored] = {}
    for peft_name, pair in pairs.items():
        if len(pair) < 2:
            raise CheckpointError(
                f"{folder}: {peft_name[:120]!r} has lora_{next(iter(pair))}, but not the other factor"
            )
        if not config.is_target(peft_name):
            raise CheckpointError(f"{folder}: {peft_name[:120]!r} has tensors, but is not one of the target_modules")
        name = (model.weight_name(f"{peft_name}.weight") or "").removesuffix(".weight")
        if name in found:
            raise CheckpointError(f"{folder}: {found[name].peft_name!r} and {peft_name!r} are the same module")
        if pair["A"].shape[:1] != (config.rank_of(peft_name),):
            raise CheckpointError(
                f"{folder}: lora_A of {peft_name[:120]!r} is {list(pair['A'].shape)[:4]}, but adapter_config.json says "
                f"rank {config.rank_of(peft_name)}"
            )
        found[name] = _Stored(peft_name, pair["A"], pair["B"], config.scale_of(peft_name))
    return found


def _check_fit(
    folder: Path, stored: Mapping[str, _Stored], sizes: Mapping[str, tuple[int, int]], max_rank: int
) -> None:
    for name, module in stored.items():
        shown = module.peft_name[:120]
        if name not in sizes:
            kinds = sorted({known.rpartition(".")[2] for known in sizes})
            raise UnsupportedModelError(
                f"{folder} adapts {shown!r}: this model has no such module, or it cannot have an adapter; possible are "
                f"{', '.join(kinds)}"
            )
        (n, k), rank = sizes[name], module.a.shape[0]
        if rank > max_rank:
            raise CheckpointError(
                f"{folder}: rank {rank} of {shown!r} is more than max_lora_rank={max_rank}: start with a larger one"
            )
        if (module.a.shape, module.b.shape) != ((rank, k), (n, rank)):
            raise CheckpointError(
                f"{folder}: {shown!r} has lora_A {list(module.a.shape)[:4]} and lora_B {list(module.b.shape)[:4]}, but "
                f"this model needs {[rank, k]} and {[n, rank]}: the adapter is another model's"
            )


def _read(
    folder: Path, checkpoint: MappedCheckpoint, name: str, stored: _Stored, dtype: torch.dtype, digest: blake2b
) -> AdapterModule:
    """The module's tensors, where they lie in the file. All that determines their product goes into the digest."""
    digest.update(repr((name, stored.scale, stored.a.shape, stored.a.dtype, stored.b.shape, stored.b.dtype)).encode())
    factors: dict[str, Tensor] = {}
    for factor, info, scale in (("a", stored.a, 1.0), ("b", stored.b, stored.scale)):
        with reading(checkpoint, info.name) as tensor:
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
            largest = tensor.abs().amax().float() * scale  # of NaNs, NaN
            if not bool(largest.to(dtype).isfinite()):
                raise CheckpointError(
                    f"{folder}: {info.name[:120]!r} times its scale {scale:g} holds infinities or NaNs"
                )
            factors[factor] = tensor
    return AdapterModule(factors["a"], factors["b"], stored.scale)

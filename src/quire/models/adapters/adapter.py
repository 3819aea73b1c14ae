"""What an adapter is to a model: low-rank factors for some of its projections."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.config.parallel import Range
from quire.models.base import Model
from quire.models.layers.linear import Linear
from quire.models.weights.quantization import matrices


@dataclass(frozen=True, slots=True)
class AdapterModule:
    """Adds `scale * b @ (a @ x)` to what a module makes of x."""

    a: Tensor
    """[rank, k]"""
    b: Tensor
    """[n, rank]"""
    scale: float


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """What is known of an adapter without its tensors."""

    digest: str
    """Hexadecimal BLAKE2b-128 of everything that determines what the adapter computes: equal for equal content,
    wherever it lies and whatever it is called."""
    num_bytes: int
    """Memory that a worker keeps for it."""
    rank: int
    """The largest of its modules."""
    base_model_name: str | None
    """The model that it was trained for, as its configuration names it. Not checked."""


@dataclass(frozen=True, slots=True)
class Adapter(AdapterInfo):
    """An adapter that fits a model. Its tensors lie in a mapped file, and are not to be written to."""

    modules: Mapping[str, AdapterModule]
    """By the checkpoint's name of the module, after the model's renames: `layers.0.self_attn.q_proj`."""


def projections(model: Model) -> Iterator[tuple[Linear, list[str]]]:
    """Each layer that can have adapters, and the names of the modules that it fuses."""
    for layer, names in matrices(model):
        if isinstance(layer, Linear) and layer.takes_adapters:
            yield layer, names


def pack(
    layer: Linear, modules: Sequence[AdapterModule | None], memory: Tensor | None = None
) -> kernels.LoRAWeight | None:
    """An adapter's part of a layer in the kernels' layout, from the factors of each of the modules that it fuses.

    The scale is multiplied into `b` in float32, and the product is rounded once. None if there are no factors.
    The result may lie at the start of `memory`.
    """
    if not any(modules):
        return None
    factors = [
        None if module is None else (module.a, _rows(part.reordered(module.b.float() * module.scale), kept))
        for module, part, kept in zip(modules, layer.parts, layer.kept_of_parts(), strict=True)
    ]
    return kernels.pack_lora(factors, layer.part_sizes, layer.shape[1], layer.dtype, memory)


def _rows(tensor: Tensor, ranges: Sequence[Range]) -> Tensor:
    return torch.cat([tensor[start:end] for start, end in ranges]) if ranges else tensor[:0]


def adapter_bytes(model: Model, ranks: Mapping[str, int]) -> int:
    """What a worker keeps of an adapter that has these ranks in these modules."""
    total = 0
    for layer, names in projections(model):
        made = pack(
            layer, [_shapes(ranks.get(name, 0), part.size) for name, part in zip(names, layer.parts, strict=True)]
        )
        total += 0 if made is None else made.nbytes
    return total


def _shapes(rank: int, size: tuple[int, ...]) -> AdapterModule | None:
    if rank == 0:
        return None
    n, k = size
    return AdapterModule(torch.empty(rank, k, device="meta"), torch.empty(n, rank, device="meta"), 1.0)

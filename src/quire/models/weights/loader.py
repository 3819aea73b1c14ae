"""From a checkpoint's files to a model ready to run, one layer at a time."""

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import CheckpointError, KernelError, UnsupportedModelError
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.common.progress import progress
from quire.config.checkpoint.formats import open_checkpoint, with_folders
from quire.config.checkpoint.tensors import Checkpoint, named
from quire.config.machine import allowed_cpus
from quire.config.model import ModelConfig
from quire.config.quantization import QUANT_METHOD, QUANTIZATIONS
from quire.models.base import CausalLM, Model, PoolingModel
from quire.models.decoder.splitting import split
from quire.models.decoder.stages import keep_layers
from quire.models.layers.linear import Projection
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec
from quire.models.registry import class_of
from quire.models.weights.quantization import choose_formats
from quire.models.weights.reading import reading_limit
from quire.models.weights.stacked import MODULE_STACKS, UnstackedCheckpoint

_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Assignment:
    """One tensor that a layer wants, and the checkpoint's tensors (by the model's names) that its parts are of."""

    target: str
    """The tensor's name in the model."""
    layer: WeightedLayer
    name: str
    """The tensor's name in the layer."""
    spec: WeightSpec
    sources: tuple[str, ...]

    def is_stored_so(self, checkpoint: Checkpoint, names: Mapping[str, str]) -> bool:
        """Whether the checkpoint holds the very tensor, so that nothing has to be copied."""
        only = self.spec.parts[0]
        stored = checkpoint.tensors[names[self.sources[0]]].dtype
        is_whole_rows = len(self.sources) == 1 and only.columns is None and not only.is_arranged
        return is_whole_rows and getattr(torch, stored) is self.spec.dtype


def load_model(config: ModelConfig, ranks: kernels.Ranks | None = None) -> Model:
    """Build the model, or a rank's share of it, and fill it. Weights stream from the mapped files: stacked, packed or
    quantized, dropped.

    Peak memory is the packed weights and what the largest layer stacks. Names, shapes and dtypes are compared with the
    headers before any weight is read. Raises UnsupportedModelError, or CheckpointError naming the weights that are
    missing, unexpected, or of a wrong shape or dtype.
    """
    started = time.perf_counter()
    checkpoint = open_weights(config)
    model = build_model(config, checkpoint, ranks)
    loader = LayerLoader(model, config, checkpoint, ranks)
    is_quantized_now = config.quantization in QUANTIZATIONS and config.quant_method != QUANT_METHOD
    what = "quantizing weights" if is_quantized_now else "loading weights"
    with progress(what, sum(loader.num_bytes(layer) for layer in loader.layers), "B") as advance:
        for layer in loader.layers:
            loader.fill(layer)
            advance(loader.num_bytes(layer))
    seconds = time.perf_counter() - started
    limit = reading_limit(model)
    note = "" if limit is None else f"; {limit}"
    logger.info(
        "loaded %s in %.2f s, to run with the kernels %s%s", config.model, seconds, _kernels_and_threads(), note
    )
    return model.eval()


def _kernels_and_threads() -> str:
    """In words, and what is unusual about them."""
    count, num_cpus = kernels.num_threads(), len(allowed_cpus())
    by = " (QUIRE_ISA says so)" if os.environ.get("QUIRE_ISA") else ""
    shared = f", more than the {num_cpus} CPUs that they share" if count > num_cpus else ""
    return f"{kernels.isa()}{by} on {count} thread{'s' * (count != 1)}{shared}"


class LayerLoader:
    """Fills the layers of a model, one at a time, from a checkpoint whose headers are checked against it."""

    def __init__(
        self, model: Model, config: ModelConfig, checkpoint: Checkpoint, ranks: kernels.Ranks | None = None
    ) -> None:
        """Reads no weights, but for copies of tied ones. Raises as load_model."""
        self.names = names_in_checkpoint(model, config, checkpoint)
        """The model's name of each tensor -> the checkpoint's."""
        self.layers: dict[WeightedLayer, list[Assignment]] = {}
        """What each layer wants."""
        wanted = assignments(model)
        has_all = config.layers is None and not (ranks is not None and ranks.shard.has_whole_experts)
        of_all = wanted if has_all else assignments(whole_model(config, checkpoint))
        _check(config, checkpoint, self.names, of_all)
        _check_copies(model, config, checkpoint, self.names)
        for assignment in wanted:
            self.layers.setdefault(assignment.layer, []).append(assignment)
        self._path, self._checkpoint = config.path, checkpoint
        # One buffer for all stacks: fresh ones would leave holes between the packed weights.
        groups = self.layers.values()
        stacks = (sum(_aligned(a.spec.stack_bytes) for a in group if len(a.sources) > 1) for group in groups)
        self._scratch = torch.empty(max(stacks, default=0), dtype=torch.uint8)

    def num_bytes(self, layer: WeightedLayer) -> int:
        """What the layer keeps."""
        return sum(assignment.spec.num_bytes for assignment in self.layers[layer])

    def fill(self, layer: WeightedLayer) -> None:
        """Give the layer its weights. Raises CheckpointError naming the weight with values that are not possible."""
        group = self.layers[layer]
        try:
            _fill(layer, group, self._checkpoint, self.names, self._scratch)
        except (KernelError, CheckpointError) as error:
            raise CheckpointError(f"{self._path}: {group[0].target}: {error}") from error


def load_servable(config: ModelConfig, ranks: kernels.Ranks | None = None) -> CausalLM | PoolingModel:
    """As load_model. Raises UnsupportedModelError, before any weight is read, if the model cannot do what the config's
    `runner` says."""
    kind = class_of(config)
    if config.runner == "generate" and not issubclass(kind, CausalLM):
        raise UnsupportedModelError(
            f"{config.model}: a {config.architecture} gives hidden states and has no language model head, so it cannot "
            "generate text"
        )
    if config.runner == "pooling" and not issubclass(kind, PoolingModel):
        raise UnsupportedModelError(f"{config.model}: a {config.architecture} has no pooler, so it cannot pool texts")
    model = load_model(config, ranks)
    assert isinstance(model, CausalLM | PoolingModel)
    return model


def open_weights(config: ModelConfig) -> Checkpoint:
    """The tensors of the checkpoint, those of experts one by one. Raises CheckpointError, reads no weights."""
    kind = class_of(config)
    checkpoint = with_folders(open_checkpoint(config.path), kind.folders(config))
    stacks = kind.stacks(config)
    return UnstackedCheckpoint(checkpoint, (*stacks, *MODULE_STACKS)) if stacks else checkpoint


def build_model(config: ModelConfig, checkpoint: Checkpoint, ranks: kernels.Ranks | None = None) -> Model:
    """The model without weights; its layers know in which formats they will want them, and which part of them."""
    model = class_of(config)(config)
    choose_formats(model, config, checkpoint)
    if config.layers is not None:
        keep_layers(model, config.layers)
    if ranks is not None:
        split(model, ranks)
    return model


def unloaded_model(config: ModelConfig, ranks: kernels.Ranks | None = None) -> Model:
    """The model, or a rank's share of it, to look at: without weights, and with tables for one position."""
    return build_model(dataclasses.replace(config, max_model_len=1), open_weights(config), ranks)


def whole_model(config: ModelConfig, checkpoint: Checkpoint | None = None) -> Model:
    """All layers of the model, also if the config is a stage's, to look at: without weights."""
    config = dataclasses.replace(config, max_model_len=1, layers=None)
    return build_model(config, checkpoint or open_weights(config))


def check_weights(config: ModelConfig) -> None:
    """Raise CheckpointError, as load_model would, unless the checkpoint has the weights of the model that its config
    describes, and no others. Reads headers, no weights."""
    checkpoint = open_weights(config)
    model = whole_model(config, checkpoint)
    _check(config, checkpoint, names_in_checkpoint(model, config, checkpoint), assignments(model))


def weight_bytes(config: ModelConfig) -> int:
    """Memory the weights will take, as the layers keep them. Reads headers, no weights."""
    return sum(assignment.spec.num_bytes for assignment in assignments(unloaded_model(config)))


def names_in_checkpoint(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's name -> the checkpoint's, for every tensor that the model needs."""
    names: dict[str, str] = {}
    copies = model.copies(config)
    for theirs in checkpoint.tensors:
        ours = model.weight_name(theirs)
        if ours in names:
            raise CheckpointError(f"{config.path}: {named([names[ours], theirs])} are the same weight {named([ours])}")
        if ours is not None and ours not in copies:
            names[ours] = theirs
    return names


def assignments(model: Model) -> list[Assignment]:
    """Every tensor that the model wants, layer by layer."""
    found = []
    for module_name, layer in model.weighted_layers():
        parent, _, own = module_name.rpartition(".")
        for name, spec in layer.weight_specs().items():
            parts, suffix = model.fused.get(own, (own,)) if len(spec.parts) > 1 else (own,), name
            if spec.modules is not None:
                fuses = isinstance(layer, Projection) and len(layer.parts) > 1
                all_parts = model.fused.get(own, (own,)) if fuses else (own,)
                parts = tuple(all_parts[module] for module in spec.modules)
            if spec.module is not None:
                parts, suffix = (model.fused.get(own, (own,))[spec.module],), name.rpartition(".")[0]
            modules = [f"{parent}.{part}" if parent else part for part in parts]
            sources = tuple(f"{module}.{suffix}" for module in modules)
            if spec.source is not None:
                sources = (spec.source,) * len(spec.parts)
            found.append(Assignment(f"{module_name}.{name}", layer, name, spec, sources))
    return found


@contextmanager
def reading(checkpoint: Checkpoint, name: str, part: Part | None = None) -> Iterator[Tensor]:
    """A tensor of the checkpoint, or a part of it: the checkpoint's own memory, never to be written to.

    It stays valid after the context, which only marks one pass over it (see Checkpoint.reading).
    """
    info = checkpoint.tensors[name]
    part = part or Part(info.shape)
    dtype: torch.dtype = getattr(torch, info.dtype)
    rows = None if part.is_arranged else part.rows
    with checkpoint.reading(name, rows) as data:
        raw = torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()  # the file leaves it unaligned
        tensor = raw.view(dtype).view(Part(part.shape, rows).size)
        if part.is_arranged:
            tensor = part.arranged(tensor)[slice(*(part.rows or (None,)))]
        yield tensor if part.columns is None else tensor[:, slice(*part.columns)]


def _fill(
    layer: WeightedLayer, group: list[Assignment], checkpoint: Checkpoint, names: Mapping[str, str], scratch: Tensor
) -> None:
    """Give the layer its tensors: those of the checkpoint where they are right as they are, and stacks in scratch."""
    tensors, used = {}, 0
    with ExitStack() as stack:
        for assignment in group:
            fault_point("weights.load", assignment.target)
            spec = assignment.spec
            if assignment.is_stored_so(checkpoint, names):
                source = names[assignment.sources[0]]
                tensors[assignment.name] = stack.enter_context(reading(checkpoint, source, spec.parts[0]))
                continue
            memory = scratch[used : used + spec.stack_bytes]
            if spec.kept or len(memory) < spec.stack_bytes:
                memory = torch.empty(spec.stack_bytes, dtype=torch.uint8)
            else:
                used += _aligned(spec.stack_bytes)
            weight = tensors[assignment.name] = memory.view(spec.dtype).view(spec.shape)
            start = 0
            for source, part in zip(assignment.sources, spec.parts, strict=True):
                length = part.size[spec.axis] if part.size else 0
                with reading(checkpoint, names[source], part) as tensor:
                    (weight.narrow(spec.axis, start, length) if part.size else weight).copy_(tensor)
                start += length
        layer.set_weights(tensors)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _check(config: ModelConfig, checkpoint: Checkpoint, names: dict[str, str], assignments: list[Assignment]) -> None:
    """Raise CheckpointError naming everything that does not fit between model and checkpoint."""
    wanted = {
        source: (part.shape, assignment.spec.dtype)
        for assignment in assignments
        for source, part in zip(assignment.sources, assignment.spec.parts, strict=True)
    }
    stored = {ours: checkpoint.tensors[theirs] for ours, theirs in names.items()}
    problems = {
        "missing": [source for source in wanted if source not in stored],
        "unexpected": [names[ours] for ours in stored if ours not in wanted],
        "of a wrong shape": [
            f"{names[source]} {list(stored[source].shape)} instead of {list(shape)}"
            for source, (shape, _) in wanted.items()
            if source in stored and stored[source].shape != shape
        ],
        "of a wrong dtype": [
            f"{names[source]} {stored[source].dtype}"
            for source, (_, dtype) in wanted.items()
            if source in stored and not _can_become(stored[source].dtype, dtype)
        ],
    }
    found = [f"{len(these)} weight(s) {what}: {named(these)}" for what, these in problems.items() if these]
    if found:
        what = f"a {config.architecture} of its" if config.head is None else f"{config.drafter} as described by"
        raise CheckpointError(f"{config.path} does not hold {what} config.json: {'; '.join(found)}")


_CONVERTIBLE = {torch.float32, torch.bfloat16, torch.float16, torch.float64}


def _can_become(stored: str, wanted: torch.dtype) -> bool:
    dtype: torch.dtype = getattr(torch, stored)
    return dtype is wanted or {dtype, wanted} <= _CONVERTIBLE


def _check_copies(model: Model, config: ModelConfig, checkpoint: Checkpoint, names: dict[str, str]) -> None:
    """A checkpoint may hold a tied head once more; a head that differs from the token table would be lost silently."""
    for copy, weight in model.copies(config).items():
        if copy not in checkpoint.tensors:
            continue
        with reading(checkpoint, copy) as theirs, reading(checkpoint, names[weight]) as ours:
            if not _can_become(checkpoint.tensors[copy].dtype, ours.dtype) or not torch.equal(theirs, ours):
                raise CheckpointError(
                    f"{config.path}: {copy} differs from {names[weight]}, although config.json ties them: "
                    "set tie_word_embeddings to false there"
                )

"""From a checkpoint's files to a model ready to run, one weight at a time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.common.errors import CheckpointError, KernelError
from quire.common.faults import fault_point
from quire.common.log import logger
from quire.config.model import ModelConfig
from quire.models.base import CausalLM
from quire.models.layers.weighted_layer import WeightedLayer, WeightSpec
from quire.models.registry import model_class
from quire.models.weights.checkpoint import Checkpoint
from quire.models.weights.quantization import choose_formats


@dataclass(frozen=True, slots=True)
class Assignment:
    """One weight of a layer, and the tensors of the checkpoint that make it up, by the model's names."""

    target: str
    """the weight's name in the model"""
    layer: WeightedLayer
    name: str
    """and in the layer"""
    spec: WeightSpec
    sources: tuple[str, ...]


_MAX_NAMED = 20
"""weights in a message"""


def load_model(config: ModelConfig) -> CausalLM:
    """Build the model and fill it. Weights stream from the mapped files: stacked, packed or quantized, dropped.

    Peak memory is the packed weights and the largest weight of a layer. Names and shapes are compared with the headers
    before any weight is read. Raises UnsupportedModelError, or CheckpointError naming the missing, unexpected and
    wrong-shaped weights.
    """
    started = time.perf_counter()
    checkpoint = Checkpoint(config.path)
    model = model_class(config.architecture)(config)
    choose_formats(model, config)
    names = names_in_checkpoint(model, config, checkpoint)
    wanted = list(assignments(model))
    _check(config, checkpoint, names, wanted)
    _check_tied_head(model, config, checkpoint, names)
    # One buffer for all stacks: fresh ones would leave holes between the packed weights.
    stacks = (assignment.spec.stack_bytes for assignment in wanted if len(assignment.sources) > 1)
    scratch = torch.empty(max(stacks, default=0), dtype=torch.uint8)
    for assignment in wanted:
        try:
            _assign(assignment, checkpoint, [names[source] for source in assignment.sources], scratch)
        except KernelError as error:
            raise CheckpointError(f"{config.path}: {assignment.target}: {error}") from error
    logger.info("loaded %s in %.2f s", config.model, time.perf_counter() - started)
    return model.eval()


def names_in_checkpoint(model: CausalLM, config: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """The model's name -> the checkpoint's, for every tensor that the model needs."""
    names: dict[str, str] = {}
    for theirs in checkpoint.tensors:
        ours = model.weight_name(config, theirs)
        if ours in names:
            raise CheckpointError(f"{config.path}: {names[ours]!r} and {theirs!r} are the same weight {ours!r}")
        if ours is not None:
            names[ours] = theirs
    return names


def assignments(model: CausalLM) -> Iterator[Assignment]:
    """Every weight of the model, in order."""
    for module_name, layer in model.weighted_layers():
        parent, _, own = module_name.rpartition(".")
        for name, spec in layer.weight_specs().items():
            parts = model.fused.get(own, (own,)) if len(spec.parts) > 1 else (own,)
            modules = [f"{parent}.{part}" if parent else part for part in parts]
            yield Assignment(
                f"{module_name}.{name}", layer, name, spec, tuple(f"{module}.{name}" for module in modules)
            )


def _check(config: ModelConfig, checkpoint: Checkpoint, names: dict[str, str], assignments: list[Assignment]) -> None:
    """Raise CheckpointError naming everything that does not fit between model and checkpoint."""
    wanted = {
        source: shape
        for assignment in assignments
        for source, shape in zip(assignment.sources, assignment.spec.parts, strict=True)
    }
    packed = {source for assignment in assignments for source in assignment.sources if assignment.spec.is_packed}
    shapes = {ours: checkpoint.tensors[theirs].shape for ours, theirs in names.items()}
    problems = {
        "missing": [source for source in wanted if source not in shapes],
        "unexpected": [names[ours] for ours in shapes if ours not in wanted],
        "of a wrong shape": [
            f"{names[source]} {list(shapes[source])} instead of {list(shape)}"
            for source, shape in wanted.items()
            if source in shapes and shapes[source] != shape
        ],
        "packed that should not be, or the reverse": [
            names[source]
            for source in wanted
            if source in shapes and (checkpoint.tensors[names[source]].dtype == "U8") != (source in packed)
        ],
    }
    found = [f"{len(these)} weight(s) {what}: {_named(these)}" for what, these in problems.items() if these]
    if found:
        raise CheckpointError(
            f"{config.path} does not hold a {config.architecture} of its config.json: {'; '.join(found)}"
        )


def _named(these: list[str]) -> str:
    return ", ".join(these[:_MAX_NAMED]) + (" and others" if len(these) > _MAX_NAMED else "")


def _check_tied_head(model: CausalLM, config: ModelConfig, checkpoint: Checkpoint, names: dict[str, str]) -> None:
    """A checkpoint may hold a tied head once more; a head that differs from the token table would be lost silently."""
    head, table = "lm_head.weight", names["embed_tokens.weight"]
    if not model.ties_embeddings(config) or head not in checkpoint.tensors:
        return
    with checkpoint.reading(head) as theirs, checkpoint.reading(table) as ours:
        if not torch.equal(theirs, ours):
            raise CheckpointError(
                f"{config.path}: {head} differs from {table}, although config.json ties them: "
                "set tie_word_embeddings to false there"
            )


def _assign(assignment: Assignment, checkpoint: Checkpoint, sources: list[str], scratch: Tensor) -> None:
    """Give the layer its weight: the mapped tensor itself where it is right as it is."""
    fault_point("weights.load", assignment.target)
    spec = assignment.spec
    if len(sources) == 1:
        with checkpoint.reading(sources[0]) as mapped:
            if mapped.dtype == spec.dtype:
                assignment.layer.set_weight(assignment.name, mapped)
                return
    num_bytes = spec.stack_bytes
    fresh = spec.kept or num_bytes > len(scratch)
    memory = torch.empty(num_bytes, dtype=torch.uint8) if fresh else scratch[:num_bytes]
    weight = memory.view(spec.dtype).view(spec.shape)
    start = 0
    for source, part in zip(sources, spec.parts, strict=True):
        with checkpoint.reading(source) as mapped:
            weight[start : start + part[0]] = mapped
        start += part[0]
    assignment.layer.set_weight(assignment.name, weight)

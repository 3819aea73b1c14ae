"""What a model's weights take: memory, and what stays in a file of which a token reads some."""

import re
from dataclasses import dataclass

from quire import kernels
from quire.config.model import ModelConfig
from quire.models.decoder.model import Decoder
from quire.models.layers.embedding import Embedding, TiedLmHead
from quire.models.layers.experts import Expert, ExpertProducts
from quire.models.layers.linear import Projection
from quire.models.layers.weight_format import Placement, SavedQuantized
from quire.models.layers.weighted_layer import WeightedLayer
from quire.models.weights.loader import assignments, unloaded_model, whole_model

_LAYER = re.compile(r"layers\.([0-9]+)\.")


@dataclass(frozen=True, slots=True)
class WeightUse:
    """Bytes of a model's weights."""

    num_bytes: int
    """Of all weights, as the layers keep them."""
    expert_bytes: int
    """Of those that are matrices of experts."""
    file_bytes: int
    """Of those that stay in a file, and take the memory that is left."""
    token_file_bytes: int
    """The most of `file_bytes` that one token reads."""


def weight_use(config: ModelConfig, ranks: kernels.Ranks | None = None) -> WeightUse:
    """Of the model, or of what a rank has of it. Reads headers, no weights."""
    model = unloaded_model(config, ranks)
    wanted = assignments(model)
    num_bytes = sum(each.spec.num_bytes for each in wanted)
    file_bytes = sum(each.spec.num_bytes for each in wanted if _stays_in_file(each.layer, each.name))
    expert_bytes = token_file_bytes = 0
    for mixture in (module for module in model.modules() if isinstance(module, ExpertProducts)):
        sizes = sorted((_matrix_bytes(each) for each in mixture.experts if isinstance(each, Expert)), reverse=True)
        expert_bytes += sum(sizes)
        token_file_bytes += sum(sizes[: mixture.top_k])
    token_file_bytes = min(token_file_bytes, file_bytes) if expert_bytes else file_bytes
    return WeightUse(num_bytes, expert_bytes, file_bytes, token_file_bytes)


def layer_bytes(config: ModelConfig) -> list[int]:
    """The bytes of each layer of a decoder, with those of the head in the last one: what a step reads of the weights.
    Reads headers, no weights."""
    model = whole_model(config)
    assert isinstance(model, Decoder)
    sizes = [0] * len(model.layers)
    head = "embed_tokens." if isinstance(model.lm_head, TiedLmHead) else "lm_head."
    for assignment in assignments(model):
        if match := _LAYER.match(assignment.target):
            sizes[int(match[1])] += assignment.spec.num_bytes
        elif assignment.target.startswith(head):
            sizes[-1] += assignment.spec.num_bytes
    return sizes


def _stays_in_file(layer: WeightedLayer, name: str) -> bool:
    kind = layer.format if isinstance(layer, Projection | Embedding) else None
    return name != "bias" and isinstance(kind, SavedQuantized) and kind.placement is Placement.IN_FILE


def _matrix_bytes(expert: Expert) -> int:
    """The bytes of an expert's matrices."""
    specs = (each.weight_specs() for each in (expert.gate_up_proj, expert.down_proj))
    return sum(spec.num_bytes for each in specs for name, spec in each.items() if name != "bias")

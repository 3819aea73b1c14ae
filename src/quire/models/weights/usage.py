"""What a model's weights take: memory, and what stays in a file of which a token reads some."""

import dataclasses
from dataclasses import dataclass

from quire.config.model import ModelConfig
from quire.models.layers.experts import Expert, ExpertProducts
from quire.models.layers.weight_format import Placement, SavedQuantized
from quire.models.weights.loader import assignments, build_model, open_weights


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


def weight_use(config: ModelConfig) -> WeightUse:
    """Reads headers, no weights."""
    model = build_model(dataclasses.replace(config, max_model_len=1), open_weights(config))
    num_bytes = sum(assignment.spec.num_bytes for assignment in assignments(model))
    expert_bytes = file_bytes = token_file_bytes = 0
    for mixture in (module for module in model.modules() if isinstance(module, ExpertProducts)):
        sizes = [_matrix_bytes(expert) for expert in mixture.experts if isinstance(expert, Expert)]
        in_file = sorted((size for size, stays in sizes if stays), reverse=True)
        expert_bytes += sum(size for size, _ in sizes)
        file_bytes += sum(in_file)
        token_file_bytes += sum(in_file[: mixture.top_k])
    return WeightUse(num_bytes, expert_bytes, file_bytes, token_file_bytes)


def _matrix_bytes(expert: Expert) -> tuple[int, bool]:
    """The bytes of an expert's matrices, and whether they stay in a file."""
    projections = (expert.gate_up_proj, expert.down_proj)
    formats = [each.format for each in projections]
    num_bytes = sum(
        spec.num_bytes for each in projections for name, spec in each.weight_specs().items() if name != "bias"
    )
    return num_bytes, all(isinstance(each, SavedQuantized) and each.placement is Placement.IN_FILE for each in formats)

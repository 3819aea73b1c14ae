"""The pass over a model's modules that chooses in which format each keeps its matrix."""

from quire.config.model import ModelConfig
from quire.models.base import CausalLM
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Linear, LmHead
from quire.models.layers.weight_format import Quantized, SavedQuantized

_FORMATS = {"int8": ("int8", "int8"), "int4": ("int4", "int8")}
"""quantization -> the format of projections, and of the head: a token's logit differs from the next best by little"""


def choose_formats(model: CausalLM, config: ModelConfig) -> None:
    """Set the formats that `config.quantization` asks for, before the layers are asked for their specs."""
    if config.quantization is None:
        return
    make = SavedQuantized if config.quantized_weights else Quantized
    projection, head = (make(format) for format in _FORMATS[config.quantization])
    for module in model.modules():
        if isinstance(module, LmHead | Embedding):
            module.format = head
        elif isinstance(module, Linear):
            module.format = projection

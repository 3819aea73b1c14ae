"""The passes over a model's modules that choose in which format each keeps its matrix."""

from collections.abc import Callable

from quire.config.checkpoint.gguf.hf_values import QUANT_METHOD as GGUF_METHOD
from quire.config.checkpoint.tensors import Checkpoint
from quire.config.model import ModelConfig
from quire.config.quantization import QUANT_METHOD
from quire.models.base import Model
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import LmHead, Projection
from quire.models.layers.weight_format import Blocks, Expanded, Packed, Quantized, SavedQuantized, WeightFormat

_FORMATS = {"int8": ("int8", "int8"), "int4": ("int4", "int8")}
"""quantization -> the format of projections, and of the head: a token's logit differs from the next best by little"""


def choose_formats(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Give each layer the format that the checkpoint or the user asks for, before the layers are asked for specs."""
    if config.quant_method is not None:
        PASSES[config.quant_method](model, config, checkpoint)
    else:
        _quantized_while_loading(model, config, checkpoint)


def _quantized_while_loading(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    if config.quantization is not None:
        _set_formats(model, config.quantization, Quantized)


def _set_formats(model: Model, quantization: str, make: Callable[[str], WeightFormat]) -> None:
    projection, head = (make(format) for format in _FORMATS[quantization])
    for module in model.modules():
        if isinstance(module, LmHead | Embedding):
            module.format = head
        elif isinstance(module, Projection):
            module.format = projection


def _saved_by_quire(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    assert config.quantization is not None
    _set_formats(model, config.quantization, SavedQuantized)


def _in_blocks(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Matrices of a GGUF file: each has a type of its own, or plain numbers. Token tables are kept as matrices too."""
    _quantized_while_loading(model, config, checkpoint)
    types = {model.weight_name(name): tensor.block_type for name, tensor in checkpoint.tensors.items()}
    for name, module in model.weighted_layers():
        if not isinstance(module, Projection | Embedding):
            continue
        parent, _, own = name.rpartition(".")
        modules = [f"{parent}.{each}" if parent else each for each in model.fused.get(own, (own,))]
        block_types = tuple(types.get(f"{each}.weight") for each in modules)
        if not any(block_types):
            continue
        if isinstance(module, Embedding) and not module.packed:
            module.packed, module.format = True, Packed()
        is_kept = config.quantization is None
        module.format = Blocks(block_types) if is_kept else Expanded(block_types, module.format)


PASSES: dict[str, Callable[[Model, ModelConfig, Checkpoint], None]] = {
    QUANT_METHOD: _saved_by_quire,
    GGUF_METHOD: _in_blocks,
}
"""quant_method of a checkpoint -> the pass that sets each module's `format`; it may look at the tensors' names, dtypes
and shapes. `quire.config.quantization.METHODS` has the same keys."""

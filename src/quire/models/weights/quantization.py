"""The passes over a model's modules that choose in which format each keeps its matrix."""

from collections.abc import Callable, Iterator, Sequence

import torch

from quire.config.checkpoint.gguf.hf_values import QUANT_METHOD as GGUF_METHOD
from quire.config.checkpoint.tensors import Checkpoint
from quire.config.model import ModelConfig
from quire.config.quantization import QUANT_METHOD
from quire.config.quantization.integers import IntegerQuantization
from quire.models.base import Model
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import LmHead, Projection
from quire.models.layers.packed_integers import PackedIntegers
from quire.models.layers.weight_format import Blocks, Expanded, Mixed, Packed, Quantized, SavedQuantized, WeightFormat

_SCALES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""The dtypes of scales that stay as they are; others become float32."""
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


def matrices(model: Model) -> Iterator[tuple[Projection | Embedding, list[str]]]:
    """Each layer with a matrix, and the names of the modules that it fuses."""
    for name, module in model.weighted_layers():
        if isinstance(module, Projection | Embedding):
            parent, _, own = name.rpartition(".")
            yield module, [f"{parent}.{each}" if parent else each for each in model.fused.get(own, (own,))]


def _set_each(module: Projection | Embedding, formats: Sequence[WeightFormat]) -> None:
    """Give each of the modules that a layer fuses a format."""
    if len(set(formats)) == 1:
        module.format = formats[0]
    else:
        assert isinstance(module, Projection)
        module.format = Mixed(tuple(formats), tuple(part.size[0] for part in module.parts))


def _in_blocks(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Matrices of a GGUF file: each has a type of its own, or plain numbers. Token tables are kept as matrices too."""
    _quantized_while_loading(model, config, checkpoint)
    types = {model.weight_name(name): tensor.block_type for name, tensor in checkpoint.tensors.items()}
    for module, names in matrices(model):
        block_types = tuple(types.get(f"{name}.weight") for name in names)
        if not any(block_types):
            continue
        if isinstance(module, Embedding) and not module.packed:
            module.packed, module.format = True, Packed()
        if config.quantization is None:
            _set_each(module, [Packed() if kind is None else Blocks(kind) for kind in block_types])
        else:
            module.format = Expanded(block_types, module.format)


def _in_integers(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Projections of a GPTQ or AWQ checkpoint: integers, or plain numbers where the configuration leaves them out."""
    integers = IntegerQuantization.read(config.hf_config)
    theirs = {model.weight_name(name): name for name in checkpoint.tensors}
    for module, names in matrices(model):
        if not isinstance(module, Projection) or not any(f"{name}.qweight" in theirs for name in names):
            continue
        formats: list[WeightFormat] = []
        for name in names:
            stored = theirs.get(f"{name}.qweight")
            if stored is None:
                formats.append(Packed())
                continue
            scheme = integers.scheme_of(stored.removesuffix(".qweight"))
            scales = checkpoint.tensors.get(theirs.get(f"{name}.scales", ""))
            scale_dtype = _SCALES.get("" if scales is None else scales.dtype, torch.float32)
            formats.append(PackedIntegers(scheme, scale_dtype, has_order=f"{name}.g_idx" in theirs))
        _set_each(module, formats)
        module.has_bias |= any(f"{name}.bias" in theirs for name in names)


PASSES: dict[str, Callable[[Model, ModelConfig, Checkpoint], None]] = {
    QUANT_METHOD: _saved_by_quire,
    GGUF_METHOD: _in_blocks,
    "gptq": _in_integers,
    "awq": _in_integers,
}
"""quant_method of a checkpoint -> the pass that sets each module's `format`; it may look at the tensors' names, dtypes
and shapes. `quire.config.quantization.METHODS` has the same keys."""

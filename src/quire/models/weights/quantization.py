"""The passes over a model's modules that choose in which format each keeps its matrix."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import nn

from quire.common.errors import UnsupportedModelError
from quire.config.checkpoint.gguf.hf_values import QUANT_METHOD as GGUF_METHOD
from quire.config.checkpoint.tensors import Checkpoint, TensorInfo
from quire.config.hf_config import HFConfig
from quire.config.model import ModelConfig
from quire.config.quantization import QUANT_METHOD, QUANTIZATIONS
from quire.config.quantization.compressed import CompressedQuantization
from quire.config.quantization.float8 import float8_block
from quire.config.quantization.integers import IntegerQuantization
from quire.models.base import Model
from quire.models.layers.embedding import Embedding
from quire.models.layers.experts import Expert
from quire.models.layers.linear import Linear, LmHead, Projection
from quire.models.layers.stored import Expanded, Plain, StoredWeight
from quire.models.layers.stored.blocks import InBlocks
from quire.models.layers.stored.compressed import CompressedIntegers
from quire.models.layers.stored.floats import Float4, Float8
from quire.models.layers.stored.gptq_awq import PackedIntegers
from quire.models.layers.weight_format import Mixed, Packed, Placement, Quantized, SavedQuantized, WeightFormat

_SCALES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
"""The dtypes of scales that stay as they are; others become float32."""
_FORMATS = {"int8": ("int8", "int8"), "int4": ("int4", "int8")}
"""quantization -> the format of projections, and of the head: a token's logit differs from the next best by little"""
_Tensors = Mapping[str, TensorInfo]
"""The tensors of one module, by their names below its own."""
_Find = Callable[[str, _Tensors], StoredWeight]
"""From the name of a module in the checkpoint, and its tensors, to how its matrix is stored."""


def choose_formats(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Give each layer the format that the checkpoint or the user asks for, before the layers are asked for specs."""
    if config.quantization in QUANTIZATIONS:
        _set_formats(model, config.quantization, Quantized)
    if config.quant_method is not None:
        PASSES[config.quant_method](model, config, checkpoint)
        _admit_biases(model, checkpoint)
    if config.head_quantization is not None:
        for head in (each for each in model.modules() if isinstance(each, LmHead | Embedding)):
            head.format = Quantized(config.head_quantization) if head.format == Packed() else head.format


def _set_formats(model: Model, quantization: str, make: Callable[[str], WeightFormat]) -> None:
    projection, head = (make(format) for format in _FORMATS[quantization])
    for module in model.modules():
        if isinstance(module, LmHead | Embedding):
            module.format = head
        elif isinstance(module, Projection) and module.is_quantizable:
            module.format = projection


def _saved_by_quire(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    assert config.quantization is not None
    placement = Placement.MAPPED if config.weights_from_file == "auto" else Placement.COPIED
    _set_formats(model, config.quantization, partial(SavedQuantized, placement=placement))
    if config.weights_from_file == "always":
        experts: list[nn.Module] = [module for module in model.modules() if isinstance(module, Expert)]
        for module in (each for parent in experts or [model] for each in parent.modules()):
            if isinstance(module, Projection | Embedding) and isinstance(module.format, SavedQuantized):
                module.format = dataclasses.replace(module.format, placement=Placement.IN_FILE)


def matrices(model: Model) -> Iterator[tuple[Projection | Embedding, list[str]]]:
    """Each layer with a matrix, and the names of the modules that it fuses."""
    for name, module in model.weighted_layers():
        if isinstance(module, Projection | Embedding):
            parent, _, own = name.rpartition(".")
            yield module, [f"{parent}.{each}" if parent else each for each in model.fused.get(own, (own,))]


def _modules(model: Model, checkpoint: Checkpoint) -> dict[str, tuple[str, dict[str, TensorInfo]]]:
    """The model's name of each module -> the checkpoint's name, and its tensors."""
    modules: dict[str, tuple[str, dict[str, TensorInfo]]] = {}
    for theirs, tensor in checkpoint.tensors.items():
        module, _, own = (model.weight_name(theirs) or "").rpartition(".")
        modules.setdefault(module, (theirs.removesuffix(f".{own}"), {}))[1][own] = tensor
    return modules


def _admit_biases(model: Model, checkpoint: Checkpoint) -> None:
    """Tools add biases to projections that have none by the config."""
    modules = _modules(model, checkpoint)
    for module, names in matrices(model):
        if isinstance(module, Linear):
            module.has_bias |= any("bias" in modules[name][1] for name in names if name in modules)


def _as_stored(make: Callable[[HFConfig], _Find], model: Model, config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Matrices as another tool stored them, or quantized again if `int8` or `int4` is asked for.

    The tensors of each module say whether it is stored so, or in plain numbers.
    """
    section, modules = config.hf_config.section("quantization_config"), _modules(model, checkpoint)
    assert section is not None
    find = make(section)
    for module, names in matrices(model):
        stored = [find(*modules.get(name, (name, {}))) for name in names]
        if all(isinstance(each, Plain) for each in stored):
            continue
        if isinstance(module, Embedding):
            if not isinstance(stored[0], InBlocks):
                continue  # only GGUF files hold token tables that are not plain
            if not module.packed:
                module.packed, module.format = True, Packed()
        elif any(
            part.is_transposed or (part.is_arranged and not isinstance(each, Plain | InBlocks))
            for part, each in zip(module.parts, stored, strict=True)
        ):
            raise UnsupportedModelError(
                f"{config.path}: weights quantized by {config.quant_method} are not supported for "
                f"{config.architecture}, whose matrix {names[0]!r} has rows in an order of its own; quantize the "
                "original checkpoint while it is loaded, with quantization='int8' or 'int4'"
            )
        is_plain = isinstance(module, Projection) and not module.is_quantizable
        _set_stored(module, tuple(stored), is_expanded=is_plain or config.quantization in QUANTIZATIONS)


def _set_stored(module: Projection | Embedding, stored: tuple[StoredWeight, ...], *, is_expanded: bool) -> None:
    sizes = tuple(part.size[0] for part in module.parts) if isinstance(module, Projection) else module.shape[:1]
    if is_expanded:
        module.format = Expanded(stored, sizes, module.format)
    elif len(set(stored)) == 1:
        module.format = stored[0].format(sizes)
    else:
        formats = tuple(each.format((size,)) for each, size in zip(stored, sizes, strict=True))
        module.format = Mixed(formats, sizes)


def _gguf(section: HFConfig) -> _Find:
    def find(name: str, tensors: _Tensors) -> StoredWeight:
        block_type = tensors["weight"].block_type if "weight" in tensors else None
        return Plain() if block_type is None else InBlocks(block_type)

    return find


def _gptq_awq(section: HFConfig) -> _Find:
    quantization = IntegerQuantization.read(section)

    def find(name: str, tensors: _Tensors) -> StoredWeight:
        if "qweight" not in tensors:
            return Plain()
        scheme = quantization.scheme_of(name)
        return PackedIntegers(scheme, _scale_dtype(tensors, "scales"), scheme.is_reordered or "g_idx" in tensors)

    return find


def _compressed(section: HFConfig) -> _Find:
    quantization = CompressedQuantization.read(section)

    def find(name: str, tensors: _Tensors) -> StoredWeight:
        scheme = quantization.scheme_of(name)
        if scheme is None or "weight_scale" not in tensors:
            return Plain()
        if scheme.format == "mxfp4-pack-quantized":
            return Float4("weight_packed", "weight_scale", is_in_blocks=False)
        if scheme.format == "float-quantized":
            return _float8(scheme.block, "weight_scale", tensors)
        shape = tensors.get("weight_shape")
        return CompressedIntegers(
            scheme,
            _scale_dtype(tensors, "weight_scale"),
            _only_scale(scheme.block, tensors["weight_scale"]),
            None if shape is None else torch.int32 if shape.dtype == "int32" else torch.int64,
            scheme.is_reordered or "weight_g_idx" in tensors,
        )

    return find


def _fp8(section: HFConfig) -> _Find:
    block = float8_block(section)

    def find(name: str, tensors: _Tensors) -> StoredWeight:
        scale = next((each for each in ("weight_scale_inv", "weight_scale") if each in tensors), None)
        return Plain() if scale is None else _float8(block, scale, tensors)

    return find


def _mxfp4(section: HFConfig) -> _Find:
    stored = Float4("weight_blocks", "weight_scales", is_in_blocks=True)
    return lambda name, tensors: stored if stored.weight_name in tensors else Plain()


def _float8(block: tuple[int, int], scale: str, tensors: _Tensors) -> Float8:
    inputs = tensors.get("input_scale")
    input_shape = None if inputs is None else () if inputs.shape == () else (1,)
    return Float8(block, scale, _scale_dtype(tensors, scale), _only_scale(block, tensors[scale]), input_shape)


def _scale_dtype(tensors: _Tensors, name: str) -> torch.dtype:
    return _SCALES.get(tensors[name].dtype if name in tensors else "", torch.float32)


def _only_scale(block: tuple[int, int], scale: TensorInfo) -> tuple[int, ...] | None:
    """The shape of a scale for a whole tensor, which tools spell in two ways; None if there may be more."""
    return None if block != (0, 0) else () if scale.shape == () else (1,)


PASSES: dict[str, Callable[[Model, ModelConfig, Checkpoint], None]] = {
    QUANT_METHOD: _saved_by_quire,
    GGUF_METHOD: partial(_as_stored, _gguf),
    "gptq": partial(_as_stored, _gptq_awq),
    "awq": partial(_as_stored, _gptq_awq),
    "compressed-tensors": partial(_as_stored, _compressed),
    "fp8": partial(_as_stored, _fp8),
    "mxfp4": partial(_as_stored, _mxfp4),
}
"""quant_method of a checkpoint -> the pass that sets each module's `format`; it may look at the tensors' names, dtypes
and shapes. `quire.config.quantization.METHODS` has the same keys."""

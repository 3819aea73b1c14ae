"""A checkpoint with its matrices quantized and packed, in a folder of its own, so that a later start only maps them."""

import fcntl
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import ConfigError
from quire.common.progress import progress
from quire.config.checkpoint.gguf.files import is_gguf
from quire.config.checkpoint.hf_names import stated_values
from quire.config.checkpoint.location import CONFIG_FILE, MODULE_CONFIGS, TOKENIZER_FILES
from quire.config.checkpoint.safetensors import DTYPES, INDEX_FILE, SINGLE_FILE
from quire.config.checkpoint.tensors import Checkpoint
from quire.config.model import GENERATION_FILE, ModelConfig
from quire.config.quantization import QUANT_METHOD, QUANTIZATIONS, QUANTIZED_VERSION
from quire.models.base import Model
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Projection
from quire.models.layers.stored import Expanded
from quire.models.layers.stored.blocks import InBlocks
from quire.models.layers.weight_format import Quantized
from quire.models.weights.loader import LayerLoader, build_model, open_weights, reading

_SPELLINGS = {in_torch: spelling for spelling, (in_torch, _) in DTYPES.items()}
_ALIGNMENT = 64
"""of the first weight: the packed ones, which come first, are multiples of it long"""


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor of the new file."""

    name: str
    dtype: str
    """As safetensors spells it."""
    shape: tuple[int, ...]
    num_bytes: int
    made: Callable[[], AbstractContextManager[Tensor]]
    """Reads or makes the tensor, which may be gone after the context."""


def save_quantized(config: ModelConfig, folder: Path, write_tokenizer: Callable[[Path], None]) -> None:
    """Write the checkpoint to the new `folder` in Hugging Face layout, matrices as `config.quantization` has them.

    Packed matrices go under the model's names, stacked as its layers have them; all else as and where it was. Weights
    that another tool quantized are expanded for it. Memory is needed for one layer at a time. The folder appears when
    it is complete. If the tokenizer is in a GGUF file, `write_tokenizer` gets the folder before, and writes its files.
    Raises ConfigError if the folder is there already or there is nothing to quantize.
    """
    if config.quant_method == QUANT_METHOD:
        raise ConfigError(f"{config.model} is quantized already: use it as it is, or quantize its original anew")
    if config.quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={config.quantization!r}: must be one of {', '.join(QUANTIZATIONS)}")
    if folder.exists():
        raise ConfigError(f"{folder} exists already: name a new folder")
    if kernels.isa() == "reference":
        raise ConfigError("quantized weights are saved in the native kernels' layout, and those are not in use")
    checkpoint = open_weights(config)
    tensors = _tensors(build_model(config, checkpoint), config, checkpoint)
    with _complete_or_absent(folder) as unfinished:
        _copy_files(config, unfinished)
        if is_gguf(config.tokenizer_path):
            write_tokenizer(unfinished)
        scheme = {"quant_method": QUANT_METHOD, "format": config.quantization, "version": QUANTIZED_VERSION}
        values = {**stated_values(config.hf_config), "dtype": config.dtype, "quantization_config": scheme}
        _write_json(unfinished / CONFIG_FILE, values)
        _write(unfinished / SINGLE_FILE, tensors)


def _copy_files(config: ModelConfig, folder: Path) -> None:
    """The files of the checkpoint beside its weights; of a GGUF file, what its header says about generating."""
    if is_gguf(config.path) and config.generation_config:
        _write_json(folder / GENERATION_FILE, config.generation_config)
    for source in (config.path, config.tokenizer_path):
        for file in (file for pattern in TOKENIZER_FILES for file in source.glob(pattern)):
            if file.name not in (CONFIG_FILE, INDEX_FILE):
                shutil.copy(file, folder)
    for file in config.path.glob(MODULE_CONFIGS):
        (folder / file.parent.name).mkdir()
        shutil.copy(file, folder / file.parent.name)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(dict(values), indent=2), encoding="utf-8")


def _tensors(model: Model, config: ModelConfig, checkpoint: Checkpoint) -> list[_Saved]:
    """All tensors: the packed ones first."""
    loader = LayerLoader(model, config, checkpoint)
    packed, plain = [], []
    for name, layer in model.weighted_layers():
        group = loader.layers.get(layer, [])
        if isinstance(layer, Projection) or (isinstance(layer, Embedding) and layer.packed):
            kind = layer.format
            if isinstance(kind.inner if isinstance(kind, Expanded) else kind, Quantized):
                shape = (sum(each.spec.num_bytes for each in group if each.name != "bias"),)
                packed.append(_Saved(f"{name}.weight", "U8", shape, *shape, partial(_packed, layer, loader)))
                group = [each for each in group if each.name == "bias"]
            elif isinstance(kind, Expanded) and isinstance(layer, Projection):
                dtype, num_bytes = getattr(torch, config.dtype), sum(each.spec.num_bytes for each in group)
                made = partial(_expanded, layer, loader)
                plain.append(_Saved(f"{name}.weight", _SPELLINGS[config.dtype], layer.shape, num_bytes, made))
                group = []
        for source in (loader.names[source] for each in group for source in each.sources):
            info = checkpoint.tensors[source]
            made = partial(_plain, checkpoint, source, getattr(torch, config.dtype))
            dtype = info.dtype if info.block_type is None else config.dtype
            num_bytes = math.prod(info.logical_shape) * getattr(torch, dtype).itemsize
            plain.append(_Saved(source, _SPELLINGS[dtype], info.logical_shape, num_bytes, made))
    return packed + plain


@contextmanager
def _packed(layer: Projection | Embedding, loader: LayerLoader) -> Iterator[Tensor]:
    """The matrix of a layer, which has it in the context alone."""
    loader.fill(layer)
    matrix = layer.table if isinstance(layer, Embedding) else layer.weight
    assert isinstance(matrix, kernels.QuantizedWeight)
    yield matrix.data
    if isinstance(layer, Embedding):
        del layer.table
    else:
        del layer.weight


@contextmanager
def _expanded(layer: Projection, loader: LayerLoader) -> Iterator[Tensor]:
    """The matrix of a layer that keeps plain numbers, although its tensors are stored otherwise."""
    n, k = layer.shape
    plain = Projection(k, n, bias=False, dtype=layer.dtype)
    plain.format = layer.format
    loader.layers[plain] = loader.layers[layer]
    loader.fill(plain)
    assert isinstance(plain.weight, kernels.PackedWeight)
    yield kernels.unpack_weight(plain.weight)


@contextmanager
def _plain(checkpoint: Checkpoint, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """A tensor of the checkpoint; one in blocks (a token table without a head tied to it) expanded to `dtype`."""
    info = checkpoint.tensors[name]
    with reading(checkpoint, name) as stored:
        if info.block_type is None:
            yield stored
            return
        table = torch.empty(info.logical_shape, dtype=dtype)
        InBlocks(info.block_type).expand(table, {"weight": stored})
        yield table


def _write(path: Path, tensors: list[_Saved]) -> None:
    """As https://github.com/huggingface/safetensors has it; the data begins at a multiple of 64."""
    header, end = {}, 0
    for saved in tensors:
        header[saved.name] = {
            "dtype": saved.dtype, "shape": list(saved.shape), "data_offsets": [end, end + saved.num_bytes],
        }  # fmt: skip
        end += saved.num_bytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("wb") as file, progress("quantizing and writing weights", end, "B") as advance:
        file.write(len(text).to_bytes(8, "little") + text)
        for saved in tensors:
            with saved.made() as tensor:
                assert tensor.nbytes == saved.num_bytes
                file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
            advance(saved.num_bytes)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its name if the block ends well, and goes if it does not. It is locked, so
    that the next run can tell whether it is left of a process that was killed, and then removes it."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    for unfinished in folder.parent.glob(f".{escape(folder.name)}.{'[0-9a-f]' * 8}"):
        with _locked(unfinished) as is_locked:
            if is_locked:
                shutil.rmtree(unfinished, ignore_errors=True)  # it may belong to another user
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"the folder {str(folder)!r} cannot be made: {error.strerror}") from error
    with _locked(partial):
        try:
            yield partial
            try:
                partial.rename(folder)
            except OSError as error:
                raise ConfigError(f"the folder {str(folder)!r} cannot be made: {error.strerror}") from error
        except BaseException:
            shutil.rmtree(partial)
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock the folder during the block. False if another process has the lock, or the file system has no locks."""
    with ExitStack() as stack:
        try:
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            is_locked = False
        else:
            is_locked = True
        yield is_locked

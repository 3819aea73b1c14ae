"""A checkpoint with its matrices quantized and packed, in a folder of its own, so that a later start only maps them."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quire import kernels
from quire.common.errors import ConfigError
from quire.common.progress import progress
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.gguf.files import is_gguf
from quire.config.checkpoint.location import TOKENIZER_FILES
from quire.config.checkpoint.safetensors import DTYPES, INDEX_FILE, SINGLE_FILE
from quire.config.model import ModelConfig
from quire.config.quantization import QUANT_METHOD, QUANTIZED_VERSION
from quire.models.base import Model
from quire.models.layers.embedding import Embedding
from quire.models.weights.loader import assignments, load_model, names_in_checkpoint, reading

_SPELLINGS = {in_torch: spelling for spelling, (in_torch, _) in DTYPES.items()}
_ALIGNMENT = 64
"""of the first weight: the packed ones, which come first, are multiples of it long"""


def save_quantized(config: ModelConfig, folder: Path) -> None:
    """Write the checkpoint to the new `folder` in Hugging Face layout, matrices as `config.quantization` has them.

    Packed matrices go under the model's names, stacked as its layers have them; all else as and where it was. The
    folder appears when it is complete. Raises ConfigError if it is there already or there is nothing to quantize.
    """
    if is_gguf(config.path):
        raise ConfigError(
            f"{config.model}: weights of a GGUF file are not saved in another format; load the file itself, with "
            f"--quantization {config.quantization} if they should be quantized again"
        )
    if config.quantization is None or config.quant_method is not None:
        raise ConfigError(
            f"{config.model}: " + ("quantized already" if config.quant_method is not None else "quantize to what?")
        )
    if folder.exists():
        raise ConfigError(f"{folder} exists already: name a new folder")
    if kernels.isa() == "reference":
        raise ConfigError("quantized weights are saved in the native kernels' layout, and those are not in use")
    model = load_model(config)
    with _complete_or_absent(folder) as partial:
        for source in (config.path, config.tokenizer_path):
            for pattern in TOKENIZER_FILES:
                for file in source.glob(pattern):
                    if file.name not in ("config.json", INDEX_FILE):
                        shutil.copy(file, partial)
        scheme = {"quant_method": QUANT_METHOD, "format": config.quantization, "version": QUANTIZED_VERSION}
        values = {**config.hf_config, "dtype": config.dtype, "quantization_config": scheme}
        (partial / "config.json").write_text(json.dumps(values, indent=2), encoding="utf-8")
        _write(partial / SINGLE_FILE, _tensors(model, config))


def _tensors(model: Model, config: ModelConfig) -> dict[str, tuple[str, Tensor]]:
    """Name -> dtype as safetensors spells it, and the tensor: the packed ones first."""
    checkpoint = open_checkpoint(config.path)
    names = names_in_checkpoint(model, config, checkpoint)
    packed, plain = {}, {}
    for assignment in assignments(model):
        layer = assignment.layer
        matrix = layer.table if isinstance(layer, Embedding) else getattr(layer, assignment.name)
        if isinstance(matrix, kernels.QuantizedWeight):
            packed[assignment.target] = ("U8", matrix.data)
        else:
            for source in (names[source] for source in assignment.sources):
                with reading(checkpoint, source) as tensor:
                    plain[source] = (_SPELLINGS[checkpoint.tensors[source].dtype], tensor)
    return packed | plain


def _write(path: Path, tensors: dict[str, tuple[str, Tensor]]) -> None:
    """As https://github.com/huggingface/safetensors has it; the data begins at a multiple of 64."""
    header, end = {}, 0
    for name, (dtype, tensor) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with path.open("wb") as file, progress("writing weights", end, "B") as advance:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)
            advance(tensor.nbytes)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _complete_or_absent(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which takes its name if the block ends well, and goes if it does not."""
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial)
        raise

"""A checkpoint's weights: which file holds which tensor, each mapped into memory and read when it is asked for."""

import dataclasses
import math
import mmap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from quire.common.errors import CheckpointError
from quire.config.hf_config import read_json_object
from quire.config.model import ModelConfig
from quire.config.safetensors_header import TensorInfo, read_header
from quire.models.registry import model_class
from quire.models.weights.quantization import choose_formats

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_TORCH_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "U8": torch.uint8,
}


class Checkpoint:
    """All tensors of a folder by name, headers validated. Opening it reads no weights."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self.tensors: dict[str, TensorInfo] = {}
        for path, names in _weight_files(folder).items():
            header = read_header(path)
            missing = sorted(set(names or ()) - header.keys())
            if missing:
                raise CheckpointError(f"{path} lacks what {INDEX_FILE} promises of it: {', '.join(missing)}")
            for name in header if names is None else names:
                self.tensors[name] = header[name]
                self._file_of[name] = path
        self._maps: dict[Path, mmap.mmap] = {}

    def mapped(self, name: str) -> Tensor:
        """The tensor as it lies in the file: nothing is copied, pages are read on first touch. Do not write to it."""
        info = self.tensors[name]
        dtype = _TORCH_DTYPES.get(info.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self._file_of[name]}: weight {name!r} has dtype {info.dtype}, "
                f"readable are {', '.join(_TORCH_DTYPES)}"
            )
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        mapping = self._mapping(self._file_of[name])
        if info.offset % dtype.itemsize == 0:
            return torch.frombuffer(mapping, dtype=dtype, count=math.prod(info.shape), offset=info.offset).view(
                info.shape
            )
        raw = bytearray(mapping[info.offset : info.offset + info.num_bytes])  # the file leaves it unaligned: copy
        return torch.frombuffer(raw, dtype=dtype).view(info.shape)

    @contextmanager
    def reading(self, name: str) -> Iterator[Tensor]:
        """`mapped`, for one pass over the weight: on leaving, its pages no longer count as this process's memory."""
        yield self.mapped(name)
        info = self.tensors[name]
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = info.offset + info.num_bytes - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping(self._file_of[name]).madvise(mmap.MADV_DONTNEED, start, length)

    def _mapping(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            if hasattr(mmap, "MADV_WILLNEED"):  # read ahead in large pieces while the first weights are packed
                self._maps[path].madvise(mmap.MADV_WILLNEED)
        return self._maps[path]


def weight_bytes(config: ModelConfig) -> int:
    """Memory the weights will take, as the layers keep them. Reads headers, no weights."""
    Checkpoint(config.path)  # refuses one that lacks files
    model = model_class(config.architecture)(dataclasses.replace(config, max_model_len=1))  # no long rotary table
    choose_formats(model, config)
    return sum(spec.num_bytes for _, layer in model.weighted_layers() for spec in layer.weight_specs().values())


def _weight_files(folder: Path) -> Mapping[Path, list[str] | None]:
    """Files to open, and the tensors to take from each (None: all it has)."""
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if single.is_file():
        return {single: None}
    if index.is_file():
        return _indexed_files(folder, index)
    if any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has safetensors files, but neither {SINGLE_FILE} nor {INDEX_FILE}: incomplete")
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    found = f"its weights in {', '.join(pickles)}, a format that can run code" if pickles else "no safetensors weights"
    raise CheckpointError(
        f"{folder} has {found}; Quire reads {SINGLE_FILE} or {INDEX_FILE}, never pickles (*.bin, *.pt). Convert such a "
        "checkpoint once, where you trust it: transformers' "
        "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder) writes safetensors"
    )


def _indexed_files(folder: Path, index: Path) -> Mapping[Path, list[str] | None]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index} has no 'weight_map' of tensor names to files")
    files: dict[Path, list[str] | None] = {}
    by_file: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or file != Path(file).name or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index} places {name!r} in {file!r}: must be a safetensors file of the same folder")
        by_file.setdefault(file, []).append(name)
    present = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for file, names in by_file.items():
        if file not in present:
            raise CheckpointError(
                f"{folder} lacks the weight file {file}, which {INDEX_FILE} names (download it again)"
            )
        files[folder / file] = names
    return files

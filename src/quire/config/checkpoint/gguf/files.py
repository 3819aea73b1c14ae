"""GGUF models of one file or several: which files belong together, and what their headers say."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from quire.common.errors import CheckpointError
from quire.config.checkpoint.gguf.header import Header, read_header
from quire.config.checkpoint.tensors import MappedTensor
from quire.config.hf_config import HFConfig

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_NO_MODEL = re.compile(r"(?i)(^|[-._])mmproj[-._]|(^|[-._])imatrix[-._]")
"""Files beside models: encoders of images, and statistics for quantizing."""
_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class GGUFModel:
    """The headers of a model's files."""

    metadata: HFConfig
    """The first file's keys."""
    tensors: Mapping[str, MappedTensor]
    """All files' tensors, by their names there."""


def is_gguf(path: Path) -> bool:
    """Whether this is the path of a GGUF file, not of a folder."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def read_gguf(path: Path) -> GGUFModel:
    """Read the headers of the model that `path` is, or is a part of. Raises CheckpointError if a file is missing or
    malformed, or belongs to another model."""
    paths = parts_of(path)
    headers = [read_header(part) for part in paths]
    tensors: dict[str, MappedTensor] = {}
    for number, (part, header) in enumerate(zip(paths, headers, strict=True)):
        _check_part(part, header, number, len(paths))
        if twice := sorted(tensors.keys() & header.tensors.keys()):
            raise CheckpointError(f"{part} holds {twice[0]!r} again, which an earlier part of this model has")
        tensors |= header.tensors
    first = headers[0].metadata
    if len(paths) > 1 and first.get("split.tensors.count", len(tensors)) != len(tensors):
        raise CheckpointError(
            f"{paths[0]} promises {first['split.tensors.count']} tensors, the {len(paths)} parts hold {len(tensors)}"
        )
    return GGUFModel(HFConfig(first, str(paths[0])), tensors)


def parts_of(path: Path) -> list[Path]:
    """All files of the model that `path` is a file of, in order. Raises CheckpointError if one is missing."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count, number = int(match["count"]), int(match["number"])
    if not 1 <= number <= count:
        raise CheckpointError(f"{path} is called part {number} of {count}")
    present = {file.name for file in path.parent.glob("*.gguf")}
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    if absent := next((name for name in names if name not in present), None):
        raise CheckpointError(f"{path.parent} lacks {absent}, a part of this model (download it again)")
    return [path.parent / name for name in names]


def models_in(folder: Path, *, recursive: bool = False) -> list[Path]:
    """The first file of each model in `folder`, sorted."""
    paths = {path: _PART.fullmatch(path.name) for path in folder.glob("**/*.gguf" if recursive else "*.gguf")}
    firsts = [path for path, part in paths.items() if part is None or int(part["number"]) == 1]
    return sorted(path for path in firsts if _NO_MODEL.search(path.name) is None)


def only_model(folder: Path, wanted: str | None = None, *, recursive: bool = False) -> Path:
    """The one model in `folder`. `wanted` is the name of a file, or a quantization such as Q4_K_M that is part of one.

    Raises CheckpointError, which names those that are there, unless there is exactly one.
    """
    there = models_in(folder, recursive=recursive)
    found = there if wanted is None else _named(there, wanted)
    if len(found) == 1:
        return found[0]
    names = ", ".join(str(path.relative_to(folder)) for path in there[:_MAX_NAMED])
    names += " and others" if len(there) > _MAX_NAMED else ""
    what = f"{len(found)} GGUF models" if wanted is None else f"{len(found)} GGUF models named {wanted!r}"
    raise CheckpointError(
        f"{folder} has {what}{f' (there are {names})' if there else ''}: give the path of one, or its name as gguf_file"
    )


def _named(paths: list[Path], wanted: str) -> list[Path]:
    """Those with this name, or else those whose name ends with it."""
    stems = {path: match["stem"] if (match := _PART.fullmatch(path.name)) else path.stem for path in paths}
    whole = [path for path, stem in stems.items() if wanted.lower() in (path.name.lower(), stem.lower())]
    end = re.compile(rf"(?i)[-._]{re.escape(wanted)}$")
    return whole or [path for path, stem in stems.items() if end.search(stem)]


def _check_part(path: Path, header: Header, number: int, count: int) -> None:
    said = header.metadata.get("split.count", 1), header.metadata.get("split.no", 0)
    if said != (count, number) and (count > 1 or said[0] not in (0, 1)):
        raise CheckpointError(
            f"{path} says that it is part {said[1]} (from 0) of {said[0]}, but its name says part {number} of {count}: "
            "the parts of a model must keep their names"
        )

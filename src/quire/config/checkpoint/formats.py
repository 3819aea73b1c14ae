"""The formats of checkpoints that Quire reads, and the choice between them by what a folder or a file is."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.common.errors import CheckpointError
from quire.config.checkpoint.gguf.files import is_gguf, parts_of
from quire.config.checkpoint.safetensors import INDEX_FILE, SINGLE_FILE, open_safetensors, read_header
from quire.config.checkpoint.tensors import Checkpoint, MappedCheckpoint

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_CONVERT = "transformers' AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"
_CONVERT_HEAD = 'safetensors.torch.save_file(torch.load("pytorch_model.bin", weights_only=True), "model.safetensors")'


@dataclass(frozen=True, slots=True)
class CheckpointFormat:
    """One way of keeping weights in a folder."""

    patterns: tuple[str, ...]
    """The names of its files. A folder that has one of them is of this format; a hub id's are downloaded."""
    open: Callable[[Path], Checkpoint]
    """Reads the headers in such a folder. Raises CheckpointError if a file is missing or malformed."""


FORMATS: dict[str, CheckpointFormat] = {
    "safetensors": CheckpointFormat(("*.safetensors", INDEX_FILE), open_safetensors),
}
"""A folder of several formats is read as the first of them."""


def find_format(folder: Path) -> CheckpointFormat | None:
    """The format of the weights in `folder`; None if there are none that Quire reads."""
    return next((f for f in FORMATS.values() if any(any(folder.glob(p)) for p in f.patterns)), None)


def weight_files(path: Path) -> list[Path]:
    """The files of the weights in a folder, or of a GGUF model. Raises CheckpointError if a part of one is missing."""
    return parts_of(path) if is_gguf(path) else sorted(path.glob("*.safetensors"))


def with_folders(checkpoint: Checkpoint, folders: Mapping[str, Path]) -> Checkpoint:
    """The checkpoint and the tensors of more folders or files of safetensors, each under its prefix."""
    if not folders:
        return checkpoint
    assert isinstance(checkpoint, MappedCheckpoint)  # what has such folders is a folder
    tensors = dict(checkpoint.tensors)
    for prefix, folder in folders.items():
        opened = read_header(folder) if folder.is_file() else open_safetensors(folder).tensors
        tensors |= {f"{prefix}{name}": replace(info, name=f"{prefix}{name}") for name, info in opened.items()}
    return MappedCheckpoint(tensors)


def open_checkpoint(folder: Path, *, drafts: bool = False) -> Checkpoint:
    """The weights in `folder`, or in a GGUF file and its parts. Raises CheckpointError if they are missing, incomplete
    or in no format of the table; `drafts`: they may be a draft head's, which transformers does not load."""
    if is_gguf(folder):
        from quire.config.checkpoint.gguf.weights import open_gguf  # imported late because it loads numpy

        return open_gguf(folder)
    if found := find_format(folder):
        return found.open(folder)
    pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
    what = f"its weights in {', '.join(pickles)}, a format that can run code" if pickles else "no safetensors weights"
    way = f"a draft head by {_CONVERT_HEAD}, a model by {_CONVERT}" if drafts else _CONVERT
    raise CheckpointError(
        f"{folder} has {what}; Quire reads {SINGLE_FILE} or {INDEX_FILE}, never pickles (*.bin, *.pt). Convert such a "
        f"checkpoint once, where you trust it: {way}"
    )

"""Where a checkpoint is: a folder, a GGUF file, one inside this package, or a download from the hub."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.common.errors import CheckpointError, ConfigError, nearest_name
from quire.common.progress import hub_bar
from quire.config.checkpoint.formats import FORMATS, find_format
from quire.config.checkpoint.gguf.files import is_gguf, models_in, only_model
from quire.config.checkpoint.runners import MODULES_FILE

EMBEDDED_CHECKPOINTS = ("quire-tiny", "quire-draft")
"""Names of the checkpoints inside this package."""
CONFIG_FILE = "config.json"

EMBEDDED_ROOT = Path(__file__).parents[2] / "models" / "embedded"
_HUB_ID = re.compile(r"(?=.{3,256}$)(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<file>[\w.-]+))?")
_CONFIG_FILES = ("*.json", "*.jinja")
_VOCABULARIES = ("tekken.json", "*.model", "*.tiktoken", "*.txt")
"""What a tokenizer is made of where there is no tokenizer.json."""
TOKENIZER_FILES = (*_CONFIG_FILES, *_VOCABULARIES)
_NOT_OURS = ("*/*", "consolidated*", "*.bin.index.json")
"""Files that are not downloaded: subfolders (other formats, original weights), and copies of the weights under other
names."""
MODULE_CONFIGS = "[0-9]*_*/config.json"
"""Of sentence-transformers' modules, in folders such as `2_Dense`."""
_MODULE_FILES = (MODULE_CONFIGS, "[0-9]*_*/model.safetensors")
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_MAX_NAMED = 12
running_downloads: set[object] = set()
"""Downloads that run in this process, in threads. They cannot be stopped, and Python does not exit before they end."""


@dataclass(frozen=True, slots=True)
class Location:
    """The name of a checkpoint as it was given, and where to look for it."""

    name: str
    """A folder, a GGUF file, a hub id `org/name`, one with the quantization of a GGUF file (`org/name:Q4_K_M`), or one
    of EMBEDDED_CHECKPOINTS."""
    gguf_file: str | None = None
    """Which GGUF file of a folder or hub id: its name, or the end of it such as Q4_K_M."""
    revision: str | None = None
    """A branch, tag or commit of a hub id."""
    download_dir: str | Path | None = None

    def find(self) -> Path:
        """The folder that holds config.json, or the GGUF file. A hub id is downloaded: config.json alone, or the GGUF
        file. Raises CheckpointError if there is neither, and ConfigError if gguf_file is given for another file."""
        if self.name in EMBEDDED_CHECKPOINTS:
            return EMBEDDED_ROOT / self.name
        if (path := _existing(self.name)) is not None:
            return self._in_folder(path) if path.is_dir() else self._file(path)
        match = _HUB_ID.fullmatch(self.name)
        if not match:
            raise CheckpointError(
                f"there is no folder or file {self.name!r}{nearest_name(self.name, EMBEDDED_CHECKPOINTS)} (allowed: a "
                f"folder, a .gguf file, a hub id such as 'org/name', or {', '.join(EMBEDDED_CHECKPOINTS)})"
            )
        wanted = self.gguf_file or match["file"]
        if wanted is not None:
            return self._downloaded_gguf(match["id"], wanted)
        folder = self._download(match["id"], (CONFIG_FILE,))
        if not (folder / CONFIG_FILE).exists():
            raise CheckpointError(f"{self.name} has no {CONFIG_FILE}{_hint(match['id'], self.revision)}")
        return folder

    def complete(self, path: Path) -> Path:
        """The folder or file with everything beside config.json, downloaded if it is a hub id's."""
        if path.is_dir() and is_downloadable(self.name):
            path = self._download_with_tokenizer([p for format in FORMATS.values() for p in format.patterns])
            if (path / MODULES_FILE).exists():
                self._download(self.name, _MODULE_FILES, ())
        return path

    def tokenizer(self) -> Path:
        """The folder or GGUF file of a tokenizer, downloaded if it is a hub id's."""
        if is_downloadable(self.name) and ":" not in self.name:
            return self._download_with_tokenizer(())
        path = _existing(self.name)
        return path if path is not None and (path / "tokenizer.json").exists() else self.find()

    def _in_folder(self, folder: Path) -> Path:
        if self.gguf_file is not None:
            return only_model(folder, self.gguf_file)
        holds_others = (folder / CONFIG_FILE).exists() and find_format(folder) is not None
        return folder if holds_others or not models_in(folder) else only_model(folder)

    def _file(self, path: Path) -> Path:
        if not is_gguf(path):
            raise CheckpointError(
                f"{self.name!r} is a file: give a .gguf file, or the folder that holds config.json and the weights"
            )
        if self.gguf_file not in (None, path.name):
            raise ConfigError(f"gguf_file={self.gguf_file!r}: the model is the file {self.name!r} already")
        return path

    def _downloaded_gguf(self, hub_id: str, wanted: str) -> Path:
        folder = self._download(hub_id, _gguf_patterns(wanted), ("*mmproj*", "*imatrix*"))
        if not models_in(folder, recursive=True):
            raise CheckpointError(f"{hub_id} has no GGUF file named {wanted!r}{_hint(hub_id, self.revision)}")
        return only_model(folder, wanted, recursive=True)

    def _download_with_tokenizer(self, patterns: Iterable[str]) -> Path:
        folder = self._download(self.name, (*_CONFIG_FILES, *patterns), (*_NOT_OURS, *_VOCABULARIES))
        return folder if (folder / "tokenizer.json").exists() else self._download(self.name, TOKENIZER_FILES)

    def _download(self, hub_id: str, patterns: Iterable[str], others: Iterable[str] = _NOT_OURS) -> Path:
        import huggingface_hub  # slow to import, and not needed for local checkpoints
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
        from huggingface_hub.utils.tqdm import tqdm

        # The hub's error derives from the general one of the library that it uses for HTTP: requests, httpx or httpx2.
        errors: tuple[Any, ...] = (*HfHubHTTPError.__bases__, HFValidationError, OSError, ValueError)
        running_downloads.add(this := object())
        try:
            folder = huggingface_hub.snapshot_download(
                hub_id,
                revision=self.revision,
                cache_dir=self.download_dir,
                allow_patterns=list(patterns),
                ignore_patterns=list(others),
                tqdm_class=hub_bar(tqdm, hub_id),
            )
        except errors as error:
            raise CheckpointError(
                f"there is no folder {self.name!r}, and it cannot be downloaded from the hub either: {error}"
            ) from error
        finally:
            running_downloads.discard(this)
        return Path(folder)


def is_downloadable(name: str) -> bool:
    """Whether this is an id of the hub, and no folder, file or embedded checkpoint has this name."""
    return bool(_HUB_ID.fullmatch(name)) and name not in EMBEDDED_CHECKPOINTS and _existing(name) is None


def _existing(name: str) -> Path | None:
    """The file or folder of this name; None if there is none. Raises CheckpointError if the system cannot tell."""
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError) as error:  # too long, not permitted, with a NUL, of an unknown user
        reason = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"{name[:80]!r} cannot be looked up as a file or folder: {reason}") from error


def adapter_folder(name: str) -> Path:
    """The absolute path of a LoRA adapter's folder. A hub id is downloaded: its settings and weights, no other files.
    Raises CheckpointError if that fails; whether a folder exists is not checked."""
    if is_downloadable(name) and ":" not in name:
        return Location(name)._download(name, _ADAPTER_FILES)
    try:
        return Path(name).expanduser().absolute()
    except RuntimeError as error:  # of an unknown user
        raise CheckpointError(f"{name[:80]!r} cannot be looked up as a file or folder: {error}") from error


def _gguf_patterns(wanted: str) -> list[str]:
    """Patterns of the files that `wanted` names, whole or in parts, at the top or in a folder of their own."""
    stem = wanted.removesuffix(".gguf")
    part = re.fullmatch(r"(.*)-\d{5}-of-\d{5}", stem)
    stem = part[1] if part else stem
    spellings = (stem, stem.upper(), stem.lower())
    stems = dict.fromkeys(f"{start}{spelling}" for spelling in spellings for start in ("", "*[-._/]"))
    return [f"{each}{end}.gguf" for each in stems for end in ("", "-?????-of-?????")]


def _hint(hub_id: str, revision: str | None) -> str:
    """The GGUF files of a hub id, for an error message; nothing if they cannot be listed."""
    import huggingface_hub

    try:
        files = huggingface_hub.HfApi().list_repo_files(hub_id, revision=revision)
    except Exception:  # the message is complete without it
        return ""
    names = [name for name in files if name.endswith(".gguf")]
    shown = ", ".join(names[:_MAX_NAMED]) + (" and others" if len(names) > _MAX_NAMED else "")
    return f"; it has {shown}: name one, as in {hub_id}:Q4_K_M" if names else ""

"""A checkpoint's JSON files, which are not trusted: typed getters whose errors name the file and the key."""

import json
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.common.errors import CheckpointError

_REQUIRED: Any = object()
_MAX_JSON_BYTES = 16 * 1024**2
MAX_SIZE = 2**31 - 1
"""The largest count or length in a config."""


class HFConfig(Mapping[str, Any]):
    """The key/value pairs of a `config.json`.

    The getters return the default where the key is absent or null, and raise CheckpointError if there is no default or
    if the value is of another type or out of range.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = dict(values)
        self.source = source
        """The file that the values came from, for error messages."""

    @classmethod
    def read(cls, path: Path, *, required: bool = True) -> "HFConfig":
        """Parse a JSON object from `path`. Raises CheckpointError if the file is huge, malformed or absent; one that is
        absent and not `required` has no values."""
        return cls(read_json_object(path) if required or path.exists() else {}, str(path))

    def replaced(self, values: Mapping[str, Any]) -> "HFConfig":
        """This config with some values replaced, which error messages mention."""
        return HFConfig({**self._values, **values}, f"{self.source} with overrides") if values else self

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def count(self, key: str, default: int = _REQUIRED) -> int:
        """A count that may be 0."""
        value = self._get(key, default)
        return 0 if type(value) is int and value == 0 else self.size(key, default)

    def size(self, key: str, default: int = _REQUIRED) -> int:
        """A count or length: an integer of at least 1."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
            raise self._wrong(key, value, f"an integer from 1 to {MAX_SIZE}")
        return value

    def number(self, key: str, default: float = _REQUIRED) -> float:
        """A finite number greater than 0."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise self._wrong(key, value, "a finite number greater than 0")
        return value

    def numbers(self, key: str, length: int) -> list[float]:
        """A list of `length` finite numbers greater than 0."""
        values = self._get(key, _REQUIRED)
        if not isinstance(values, list) or len(values) != length:
            raise self._wrong(key, values, f"a list of {length} numbers")
        return [HFConfig({key: value}, self.source).number(key) for value in values]

    def flag(self, key: str, default: bool = _REQUIRED) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str = _REQUIRED) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def section(self, key: str) -> "HFConfig | None":
        """An object inside this one, None where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(key, value, "an object")
        return HFConfig(value, f"{self.source}: {key}")

    def token_ids(self, key: str) -> frozenset[int] | None:
        """One token id or a list of them, None where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        ids = value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            raise self._wrong(key, value, "a token id or a list of token ids")
        return frozenset(ids)

    def _get(self, key: str, default: Any) -> Any:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is _REQUIRED:
            raise CheckpointError(f"{self.source} has no {key!r}: this checkpoint is incomplete")
        return value

    def _wrong(self, key: str, value: Any, expected: str) -> CheckpointError:
        shown = repr(value)
        return CheckpointError(f"{self.source}: {key!r} is {shown[:80]}, but must be {expected}")


def check_file(path: Path, max_bytes: int) -> None:
    """Raise CheckpointError if this is too large or not a regular file (a device may return bytes without end), and
    OSError if it does not exist."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):
        raise CheckpointError(f"{path} is not a regular file")
    if info.st_size > max_bytes:
        raise CheckpointError(f"{path} has {info.st_size:,} bytes: at most {max_bytes:,} are allowed")


def read_json_object(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in `path`. Raises CheckpointError if the file is missing, too large or malformed, or if it
    contains something other than an object."""
    values = _read_json(path, max_bytes)
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, but must hold an object")
    return values


def read_json_list(path: Path) -> list[Any]:
    """As read_json_object, for a list."""
    values = _read_json(path, _MAX_JSON_BYTES)
    if not isinstance(values, list):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, but must hold a list")
    return values


def _read_json(path: Path, max_bytes: int) -> Any:
    try:
        check_file(path, max_bytes)
        return json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}: not a Hugging Face checkpoint folder") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON (half-written?): {error}") from error

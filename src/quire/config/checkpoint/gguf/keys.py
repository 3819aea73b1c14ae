"""Getters for the keys of a header's architecture."""

from typing import Any

from quire.common.errors import UnsupportedModelError
from quire.config.checkpoint.gguf.header import Array
from quire.config.hf_config import HFConfig

_STRING = 8
_MAX_LAYERS = 4096


class Keys:
    """The keys that begin with the architecture's name, without it. Their errors are those of HFConfig."""

    def __init__(self, metadata: HFConfig) -> None:
        self.prefix = metadata.text("general.architecture")
        self.metadata = HFConfig({key: _shared(value) for key, value in metadata.items()}, metadata.source)

    def get(self, key: str) -> Any:
        """The value, None where there is none. An array with the same number for each layer is that number."""
        return self.metadata.get(f"{self.prefix}.{key}")

    def size(self, key: str, *default: int) -> int:
        """A count or length."""
        return self.metadata.size(f"{self.prefix}.{key}", *default)

    def number(self, key: str, *default: float) -> float:
        """A finite number greater than 0."""
        return self.metadata.number(f"{self.prefix}.{key}", *default)

    def count(self, key: str) -> int:
        """A count that may be 0, as it is where there is none."""
        return 0 if self.get(key) in (None, 0) else self.size(key)

    def heads(self) -> tuple[int, int]:
        """The numbers of heads of queries and of keys."""
        num_heads = self.size("attention.head_count")
        return num_heads, self.size("attention.head_count_kv", num_heads)

    def num_layers(self) -> int:
        """The layers of the model itself: further ones predict further tokens, and are not read."""
        return self.size("block_count") - self.count("nextn_predict_layers")

    def unsupported(self, key: str, what: str) -> UnsupportedModelError:
        """The error for a value that Quire does not compute."""
        value = str(self.get(key))[:80]
        return UnsupportedModelError(f"{self.metadata.source}: {self.prefix}.{key} is {value}: {what}")


def _shared(value: Any) -> Any:
    """The one number of an array with a number for each layer, if they are all equal; other values as they are."""
    if isinstance(value, Array) and value.type != _STRING and 0 < value.length <= _MAX_LAYERS:
        numbers = value.numbers()
        return numbers[0] if len(set(numbers)) == 1 else numbers
    return value

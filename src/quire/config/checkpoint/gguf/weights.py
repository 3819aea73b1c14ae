"""The tensors of a GGUF model as a Hugging Face checkpoint has them: what converters did to them is undone.

Blocks of a quantized type stay as they are: only whole rows of them move.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.architectures import ROPE_TABLES, Architecture, layer_of, module_of
from quire.config.checkpoint.gguf.files import GGUFModel, read_gguf
from quire.config.checkpoint.gguf.header import Array
from quire.config.checkpoint.gguf.keys import Keys
from quire.config.checkpoint.gguf.table import architecture_of
from quire.config.checkpoint.tensors import MappedCheckpoint, MappedTensor

_NORM = re.compile(r"norm\.weight$")
_QKV = "attn_qkv"
_XIELU_CONSTANTS = {"xielu.beta": 0.5, "xielu.eps": -1e-6}
_F32, _F32_BYTES = 6, 4
_Order = np.ndarray[tuple[int], np.dtype[np.intp]]


def open_gguf(path: Path) -> "GGUFCheckpoint":
    """The tensors of a model, under the names that a Hugging Face checkpoint has for them. Raises the errors of
    read_gguf, UnsupportedModelError for an architecture that Quire does not run, and CheckpointError for rows that are
    not those of its heads."""
    model = read_gguf(path)
    architecture, keys = architecture_of(model.metadata, model.tensors), Keys(model.metadata)
    found, unread = _Found({}, {}, {}), range(keys.num_layers(), keys.size("block_count"))
    for name, tensor in model.tensors.items():
        if name not in ROPE_TABLES and layer_of(name) not in unread:
            _add(found, name, tensor, architecture, keys)
    found.tensors.update(_learned(model, architecture, keys))
    return GGUFCheckpoint(found.tensors, found.orders, found.offsets)


class GGUFCheckpoint(MappedCheckpoint):
    """A model's tensors, with rows in the order of a Hugging Face checkpoint, and norms with the weights there."""

    def __init__(
        self, tensors: Mapping[str, MappedTensor], orders: Mapping[str, _Order], offsets: Mapping[str, float]
    ) -> None:
        """`orders`: of some tensors, the row of the file that each row is. `offsets`: what is subtracted."""
        super().__init__(tensors)
        self._orders, self._offsets = orders, offsets

    @contextmanager
    def reading(self, name: str, rows: tuple[int, int] | None = None) -> Iterator[memoryview]:
        """As Checkpoint says."""
        order, offset = self._orders.get(name), self._offsets.get(name)
        with super().reading(name, None if order is not None else rows) as data:
            if order is not None:
                stored = np.frombuffer(data, np.uint8).reshape(len(order), -1)
                data = memoryview(stored[order[slice(*(rows or (None,)))]].reshape(-1).data)
            if offset is not None:
                less = np.frombuffer(data, np.float32) - np.float32(offset)
                data = memoryview(less.view(np.uint8).data)
            yield data


@dataclass(frozen=True, slots=True)
class _Found:
    tensors: dict[str, MappedTensor]
    orders: dict[str, _Order]
    offsets: dict[str, float]


def _add(found: _Found, name: str, tensor: MappedTensor, architecture: Architecture, keys: Keys) -> None:
    names, module = architecture.weight_names(name), module_of(name)
    if name.removeprefix(f"blk.{layer_of(name)}.") in architecture.unsqueezed and len(tensor.shape) == 1:
        tensor = replace(tensor, shape=(1, *tensor.shape))
    if module in architecture.pairs:
        found.orders[names[0]] = _neighbours(name, tensor, keys.heads()[module == architecture.pairs[1]])
    if module == _QKV:
        parts = _parts(name, tensor, *keys.heads())
        if architecture.is_grouped:
            found.orders[names[0]] = _by_group(len(parts), *keys.heads(), tensor)
        elif len(names) > 1:
            found.tensors.update(zip(names, parts, strict=True))
            if architecture.pairs:
                for part_name, part, num_heads in zip(names, parts, keys.heads(), strict=False):
                    found.orders[part_name] = _neighbours(name, part, num_heads)
            return
    if architecture.norm_offset and _NORM.search(name):
        if tensor.dtype != "float32":
            raise UnsupportedModelError(f"{tensor.path}: the norm {name!r} is {tensor.dtype}, but must be float32")
        found.offsets[names[0]] = architecture.norm_offset
    found.tensors[names[0]] = tensor


def _neighbours(name: str, tensor: MappedTensor, num_heads: int) -> _Order:
    """Undoes the order for a rotary embedding that rotates neighbours: row 2i + j of a head is row i + j * head_dim / 2
    of the checkpoint."""
    num_rows = tensor.shape[0]
    if num_rows % (2 * num_heads):
        raise CheckpointError(f"{tensor.path}: the {num_rows} rows of {name!r} are not those of {num_heads} heads")
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _by_group(num_parts: int, num_heads: int, num_kv_heads: int, tensor: MappedTensor) -> _Order:
    """Undoes the order of all queries, all keys and all values: the queries of a key, it and its value, are a group."""
    head_dim = tensor.shape[0] // (num_heads + (num_parts - 1) * num_kv_heads)
    rows = np.arange(tensor.shape[0]).reshape(-1, head_dim)  # [all heads, head_dim]
    parts = np.split(rows, [num_heads, num_heads + num_kv_heads])
    return np.concatenate([part.reshape(num_kv_heads, -1, head_dim) for part in parts], axis=1).reshape(-1)


def _parts(name: str, tensor: MappedTensor, num_heads: int, num_kv_heads: int) -> list[MappedTensor]:
    """The rows of queries, of keys and of values."""
    counts = (num_heads, num_kv_heads, num_kv_heads)
    head_dim, rest = divmod(tensor.shape[0], sum(counts))
    if rest or num_heads % num_kv_heads:
        raise CheckpointError(
            f"{tensor.path}: the {tensor.shape[0]} rows of {name!r} are not those of {num_heads} heads of queries and "
            f"{num_kv_heads} of keys and values each"
        )
    found, offset, row_bytes = [], tensor.offset, tensor.num_bytes // tensor.shape[0]
    for count in counts:
        rows, num_bytes = count * head_dim, count * head_dim * row_bytes
        shape, block_shape = (rows, *tensor.shape[1:]), tensor.block_shape and (rows, *tensor.block_shape[1:])
        found.append(replace(tensor, offset=offset, shape=shape, block_shape=block_shape, num_bytes=num_bytes))
        offset += num_bytes
    return found


def _learned(model: GGUFModel, architecture: Architecture, keys: Keys) -> dict[str, MappedTensor]:
    """The parameters of xIELU, which are arrays of the header. Raises UnsupportedModelError if one that is constant in
    all models has another value."""
    for key, value in _XIELU_CONSTANTS.items():
        stated = keys.metadata.get(key)
        if stated is not None and (isinstance(stated, list | str) or abs(stated - value) > 1e-3 * abs(value)):
            raise UnsupportedModelError(f"{model.metadata.source}: {key} is {str(stated)[:80]}, supported is {value}")
    found = {}
    for key in ("xielu.alpha_n", "xielu.alpha_p"):
        array = model.metadata.get(key)
        if array is None:
            continue
        if not isinstance(array, Array) or array.type != _F32 or array.length != keys.num_layers():
            raise CheckpointError(f"{model.metadata.source}: {key!r} must be an array of a float32 for each layer")
        for layer in range(array.length):
            name = architecture.value_name(key, layer)
            offset = array.start + layer * _F32_BYTES
            path = Path(model.metadata.source)
            found[name] = MappedTensor(name, "float32", (1,), _F32_BYTES, path=path, offset=offset)
    return found

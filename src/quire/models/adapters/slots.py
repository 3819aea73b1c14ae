"""The pass that gives a model's projections tables of adapters, and what is put there."""

from collections.abc import Iterable

from quire import kernels
from quire.common.errors import CheckpointError, ConfigError
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.kernels.backends.reference_backend import TorchThreads
from quire.models.adapters.adapter import Adapter, adapter_bytes, pack, projections
from quire.models.base import Model
from quire.models.layers.linear import Linear
from quire.models.weights.loader import unloaded_model


class AdapterSlots:
    """Adapters of a model that are loaded at once, by slot. Owns their memory; `load` and `unload` change it.

    Making one gives each Linear of the model a table of adapters, which its `forward` adds to the rows that name their
    slots (`BatchTensors.adapters`). The tables stay in place, so recorded steps see what is loaded.
    """

    def __init__(self, model: Model, config: LoRAConfig) -> None:
        self._model, self.max_rank = model, config.max_lora_rank
        self._num_slots = config.max_loras
        self._loaded: set[int] = set()
        self._tables: list[tuple[kernels.LoRATable, Linear, list[str]]] = []
        for layer, names in projections(model):
            layer.adapters = kernels.LoRATable(
                layer.part_sizes, layer.shape[1], layer.dtype, config.max_loras, config.max_lora_rank
            )
            self._tables.append((layer.adapters, layer, names))

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put an adapter into a slot, in the place of the one there. No step of that slot's rows may be running.

        If it raises, the slot is as it was.
        """
        self._check_slot(slot)
        with TorchThreads(1):
            packed = self._pack(adapter)
        for (table, _, _), weight in zip(self._tables, packed, strict=True):
            table.put(slot, weight)
        self._loaded.add(slot)

    def _pack(self, adapter: Adapter) -> list[kernels.LoRAWeight | None]:
        """Its part of each layer, all in one piece of memory: in huge pages, which are read a sixth faster."""
        ranks = {name: len(module.a) for name, module in adapter.modules.items()}
        (memory,) = kernels.backend_for("cpu").zeroed_blocks(1, adapter_bytes(self._model, ranks))
        packed, used = [], 0
        for _, layer, names in self._tables:
            weight = pack(layer, [adapter.modules.get(name) for name in names], memory[used:])
            packed.append(weight)
            used += 0 if weight is None else weight.nbytes
        return packed

    def unload(self, slot: int) -> None:
        """Free a slot, which may be free already."""
        self._check_slot(slot)
        self._loaded.discard(slot)
        for table, _, _ in self._tables:
            table.put(slot, None)

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self._num_slots:
            raise ConfigError(
                f"slot {slot} of adapters does not exist: there are 0 to {self._num_slots - 1} (max_loras)"
            )

    def check_loaded(self, slots: Iterable[int]) -> None:
        """Raise CheckpointError if one of the slots is free."""
        for slot in slots:
            if slot not in self._loaded:
                raise CheckpointError(f"the adapter in slot {slot} is asked for, but none is loaded there")


def adapter_reserve(model: ModelConfig, config: LoRAConfig, ranks: kernels.Ranks | None = None) -> int:
    """Bytes that the memory plan keeps for adapters, in one rank of `ranks`. Reads headers, no weights."""
    if config.max_bytes is not None:
        return config.max_bytes
    empty = unloaded_model(model, ranks)
    largest = {name: config.max_lora_rank for _, names in projections(empty) for name in names}
    return config.max_loras * adapter_bytes(empty, largest)

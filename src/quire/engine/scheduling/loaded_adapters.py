"""Which LoRA adapters are in the worker's slots, and which requests wait for one. This module does not import torch."""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from quire.common.lora import KnownAdapter
from quire.common.outputs import AdapterStats
from quire.config.lora import LoRAConfig
from quire.engine.requests.sequence import SequenceGroup

MAX_COUNTED_NAMES = 64
"""Names of adapters that are counted one by one, so that metrics stay bounded; all others are counted as OTHER_NAMES.
"""
OTHER_NAMES = "other"
TURN_STEPS = 32
"""Steps in which all requests of an adapter that was loaded may start, before those that wait can claim its slot. With
fewer, requests of many adapters that arrive in turn would run one at a time."""


class AdapterLoader(Protocol):
    """Where adapters are loaded: an Executor."""

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """Load the adapter into a slot. Raises CheckpointError, and changes nothing, if it cannot be read or its
        content has another digest."""

    def unload_adapter(self, slot: int) -> None:
        """Release the memory of the adapter in a slot."""


@dataclass(slots=True, eq=False)
class _Content:
    """An adapter's content, which requests may know under several names."""

    adapter: KnownAdapter
    users: dict[SequenceGroup, str] = field(default_factory=dict)
    """The unfinished requests that use it, each with the name it is counted under."""
    holders: set[SequenceGroup] = field(default_factory=set)
    """The users that have started, and so need its slot until they end."""
    slot: int = -1
    last_use: int = 0
    """Number of the latest start of a request that uses it."""
    loaded_step: int = 0


class LoadedAdapters:
    """Owns the slots. The scheduler asks `admit` and calls `hold`; the engine calls everything else.

    A slot is held by the requests that have started with its adapter, until they end, also while they are preempted or
    swapped out. When a slot is needed, the least recently used adapter that no request holds is unloaded. A request
    whose adapter finds no slot is passed over, so that it does not block the requests behind it. To keep it from
    starving, it claims, of the slots whose adapters were loaded TURN_STEPS ago, the one with the fewest holders (or
    several, if their bytes are needed): in this step no request behind it in the policy's order starts with the adapter
    of a claimed slot. Claims are made anew in each step. The fewest holders of any slot never become more while a
    request claims it, and become fewer with each holder that ends, so the first request that waits gets a slot.
    """

    def __init__(self, config: LoRAConfig | None = None, loader: AdapterLoader | None = None) -> None:
        """Without a configuration there are no slots; with one there must be a `loader`."""
        self.max_bytes = None if config is None else config.max_bytes
        self._slots: list[_Content | None] = [None] * (0 if config is None else config.max_loras)
        self._loader = loader
        self._contents: dict[str, _Content] = {}  # by digest: those in slots, and those that requests use
        self._kept: Set[str] = frozenset()
        self._pinned: Set[str] = frozenset()
        self._claimed: set[_Content] = set()
        self.waiting: set[str] = set()
        """Digests of the adapters that have found no slot in this step: their requests need not be asked about."""
        self._num_starts = self._num_steps = 0
        self._stats: dict[str, AdapterStats] = {}

    @property
    def loaded(self) -> list[KnownAdapter]:
        """The adapters in slots."""
        return [content.adapter for content in self._slots if content is not None]

    def stats(self) -> dict[str, AdapterStats]:
        """Requests and tokens of each adapter that was used, by name."""
        return {name: replace(stats) for name, stats in self._stats.items()}

    # Requests

    def use(self, group: SequenceGroup) -> None:
        """A request is new. Does nothing for one without an adapter."""
        adapter = group.adapter
        if adapter is None:
            return
        content = self._contents.setdefault(adapter.digest, _Content(adapter))
        content.adapter = adapter  # its folder is the latest in which the content was found
        is_counted = adapter.name in self._stats or len(self._stats) < MAX_COUNTED_NAMES
        name = content.users[group] = adapter.name if is_counted else OTHER_NAMES
        self._stats.setdefault(name, AdapterStats()).num_waiting += 1

    def begin_step(self) -> None:
        """Requests may start in another step. Claims of the last one are forgotten."""
        self._num_steps += 1
        if self.waiting:
            self._claimed.clear()
            self.waiting.clear()

    def admit(self, group: SequenceGroup) -> bool:
        """Whether the request may start: its adapter is in a slot, into which this call has loaded it if need be.
        Requests must be asked about in the policy's order, those of `waiting` adapters not at all. Raises what loading
        raises."""
        content = self._content(group)
        if content.slot >= 0:
            return group in content.holders or content not in self._claimed
        victims, is_enough = self._victims(content)
        if not is_enough or any(victim.holders for victim in victims):
            self._claimed.update(victims)
            self.waiting.add(content.adapter.digest)
            return False
        for victim in victims:
            self._unload(victim)
        self._load(content)
        return True

    def hold(self, group: SequenceGroup) -> None:
        """An admitted request starts, and keeps its adapter's slot until it ends."""
        content = self._content(group)
        if group in content.holders:
            return
        content.holders.add(group)
        self._num_starts += 1
        content.last_use = self._num_starts
        stats = self._stats[content.users[group]]
        stats.num_waiting -= 1
        stats.num_running += 1

    def slot(self, group: SequenceGroup) -> int:
        """The slot of a started request's adapter."""
        return self._content(group).slot

    def release(self, group: SequenceGroup) -> None:
        """A request has ended. Does nothing for one without an adapter, or that was released already."""
        content = None if group.adapter is None else self._contents.get(group.adapter.digest)
        if content is None or group not in content.users:
            return
        stats = self._stats[content.users.pop(group)]
        if group in content.holders:
            content.holders.remove(group)
            stats.num_running -= 1
        else:
            stats.num_waiting -= 1
        stats.num_prompt_tokens += len(group.outputs.prompt_token_ids)
        stats.num_generated_tokens += sum(seq.num_output_tokens for seq in group.seqs)
        self._drop_if_unused(content)

    # Slots

    def keep_only(self, digests: Set[str], pinned: Set[str] = frozenset()) -> None:
        """Only these adapters stay in their slots while no request uses them; each other one is unloaded, now or with
        the last request that uses it. The `pinned` ones of them make room only if all others together cannot."""
        self._kept, self._pinned = digests, pinned
        for content in list(self._contents.values()):
            self._drop_if_unused(content)

    def clear(self, loader: AdapterLoader) -> None:
        """The loader and its slots are gone, and this one takes its place. No request may be unfinished."""
        self._loader = loader
        self._contents.clear()
        self._slots = [None] * len(self._slots)

    def _content(self, group: SequenceGroup) -> _Content:
        assert group.adapter is not None
        return self._contents[group.adapter.digest]

    def _victims(self, content: _Content) -> tuple[list[_Content], bool]:
        """The adapters to unload or to claim for this one, first those that are not pinned and that no request holds,
        and whether they are enough."""
        loaded = [other for other in self._slots if other is not None]
        num_free, limit = len(self._slots) - len(loaded), self.max_bytes
        free_bytes = 0 if limit is None else limit - sum(other.adapter.num_bytes for other in loaded)
        latest = self._num_steps - TURN_STEPS
        free = [c for c in loaded if c not in self._claimed and (not c.holders or c.loaded_step <= latest)]
        pinned = self._pinned
        candidates = sorted(free, key=lambda c: (c.adapter.digest in pinned, len(c.holders), c.last_use))
        victims: list[_Content] = []

        def is_enough() -> bool:
            return num_free > 0 and (limit is None or content.adapter.num_bytes <= free_bytes)

        for victim in candidates:
            if is_enough():
                break
            victims.append(victim)
            num_free, free_bytes = num_free + 1, free_bytes + victim.adapter.num_bytes
        return victims, is_enough()

    def _load(self, content: _Content) -> None:
        assert self._loader is not None
        slot = self._slots.index(None)
        self._loader.load_adapter(slot, Path(content.adapter.folder), content.adapter.digest)
        self._slots[slot], content.slot, content.loaded_step = content, slot, self._num_steps

    def _unload(self, content: _Content) -> None:
        assert self._loader is not None
        self._loader.unload_adapter(content.slot)
        self._slots[content.slot], content.slot = None, -1
        if not content.users:
            del self._contents[content.adapter.digest]

    def _drop_if_unused(self, content: _Content) -> None:
        if content.users:
            return
        if content.slot < 0:
            del self._contents[content.adapter.digest]
        elif content.adapter.digest not in self._kept:
            self._unload(content)

    def check_integrity(self) -> None:
        """AssertionError unless slots, contents, requests and limits agree."""
        for slot, content in enumerate(self._slots):
            assert content is None or content.slot == slot, f"slot {slot} has an adapter that is in {content.slot}"
        for digest, content in self._contents.items():
            assert content.adapter.digest == digest, "an adapter is found under another digest"
            assert content.slot < 0 or self._slots[content.slot] is content, "two adapters are in one slot"
            assert content.slot >= 0 or not content.holders, "a request has started without its adapter"
            assert content.slot >= 0 or content.users, "an adapter is kept that no request uses"
            assert content.holders <= content.users.keys(), "a request that has ended holds a slot"
        num_bytes = sum(adapter.num_bytes for adapter in self.loaded)
        assert self.max_bytes is None or num_bytes <= self.max_bytes, "the adapters in slots exceed max_bytes"

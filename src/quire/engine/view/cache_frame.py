"""What a watcher of the cache is told: a snapshot, then what has changed since. No torch here.

Frames are JSON, so that they can be handed through to a web page as they are. They hold no tokens and no text.
"""

from typing import Any

import msgspec

FREE, CACHED, OWNED, PINNED = range(4)
"""states of a block, as in DESIGN's vocabulary; a pinned block is an owned one that a pin holds"""


class CacheSetup(msgspec.Struct, frozen=True):
    """What does not change while an engine lives."""

    block_size: int
    num_blocks: int
    num_host_blocks: int
    num_groups: int
    max_num_seqs: int


class BlockColumns(msgspec.Struct):
    """Blocks of one tier that have changed, one entry of each column for each. What is free has nothing else to say."""

    ids: list[int]
    states: list[int]
    refs: list[int]
    """holders: table entries, pins, copies under way"""
    filled: list[int]
    """tokens computed in it"""
    depths: list[int]
    """blocks before it in its sequence"""
    hits: list[int]
    """lookups that found it since its content came"""
    hashes: list[int]
    """short name of its content, once others can find it; 0 before, and for a partly full block"""
    parents: list[int]
    """the `hashes` of the block before it, or the name of its tree's root; 0 as long as it cannot be found"""
    owners: list[list[int]]
    """`order` of the requests whose sequences hold it"""


class RequestRow(msgspec.Struct, array_like=True, gc=False):
    """One unfinished request."""

    order: int
    """its number by arrival"""
    request_id: str
    queue: str
    """running, waiting or swapped"""
    stage: str
    """prefill or decode; `grammar` while that is compiled"""
    tenant: str
    priority: int
    num_seqs: int
    num_prompt_tokens: int
    num_cached_tokens: int
    """of the prompt, found when it first started"""
    num_computed_tokens: int
    """of the sequence that is furthest"""
    num_generated_tokens: int
    """by all its sequences"""
    max_tokens: int
    """of output, by all its sequences; 0: not limited"""
    num_blocks: int
    """entries of its tables"""
    num_preemptions: int


class CacheEvent(msgspec.Struct, omit_defaults=True):
    """Something that happened since the last frame, `count` times."""

    kind: str
    """started, restarted, forked, preempted, swapped out, swapped in, finished; evicted or spilled for blocks"""
    count: int = 1
    request_id: str = ""
    reason: str = ""
    """why a request finished: stop, length, abort, ignored"""
    block_ids: list[int] = []
    """the first of those evicted or spilled to the host tier"""
    queue_s: float | None = None
    """of a finished request: arrival to start, arrival to first token, mean between tokens, arrival to end"""
    ttft_s: float | None = None
    inter_token_s: float | None = None
    e2e_s: float | None = None


class CacheUpdate(msgspec.Struct, omit_defaults=True):
    """One message to a watcher. One with a `setup` is a snapshot: all that was known before is to be forgotten."""

    number: int
    """counts up from 0 in one watch"""
    time_s: float
    """of the engine's clock"""
    setup: CacheSetup | None = None
    device: BlockColumns | None = None
    host: BlockColumns | None = None
    requests: list[RequestRow] = []
    """new ones and those that have changed"""
    gone: list[int] = []
    """`order` of those that are no more"""
    counters: dict[str, int] = {}
    """those that have changed"""
    events: list[CacheEvent] = []
    num_unlisted_events: int = 0


class CacheMirror:
    """The engine's cache as the frames so far tell it."""

    def __init__(self) -> None:
        self.setup: CacheSetup | None = None
        self.time_s = 0.0
        self.tiers: dict[str, dict[int, dict[str, Any]]] = {"device": {}, "host": {}}
        """by block, its entries in the columns; free blocks are left out"""
        self.requests: dict[int, RequestRow] = {}
        self.counters: dict[str, int] = {}
        self.events: list[CacheEvent] = []
        """of the last frame"""

    def apply(self, frame: CacheUpdate) -> None:
        """Take over what a frame says."""
        if frame.setup is not None:
            self.__init__()  # type: ignore[misc]
            self.setup = frame.setup
        self.time_s, self.events = frame.time_s, frame.events
        for name, blocks in self.tiers.items():
            columns: BlockColumns | None = getattr(frame, name)
            if columns is not None:
                _apply(blocks, columns)
        self.requests.update((row.order, row) for row in frame.requests)
        for order in frame.gone:
            del self.requests[order]
        self.counters.update(frame.counters)


def _apply(blocks: dict[int, dict[str, Any]], columns: BlockColumns) -> None:
    names = columns.__struct_fields__[1:]
    rows = zip(*[getattr(columns, name) for name in names], strict=True)
    for block_id, row in zip(columns.ids, rows, strict=True):
        blocks[block_id] = dict(zip(names, row, strict=True))
        if blocks[block_id]["states"] == FREE:
            del blocks[block_id]

"""A block manager over a small cache, and the steps of a sequence's life in it."""

from collections.abc import Sequence

from quire.common.batch import BlockPairs, SlotCopy, Transfer
from quire.config.kv_cache import KVCacheConfig, KVCacheGroup, attention_spec
from quire.kv.block_pool import BlockPool
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.place import DEVICE
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey


def make_config(
    num_blocks: int, windows: Sequence[int | None] = (None,), num_host_blocks: int = 0, max_chunk: int | None = None
) -> KVCacheConfig:
    """Blocks of four slots; one group for each window."""
    groups = tuple(KVCacheGroup((i,), attention_spec(1, 2, "float32", window)) for i, window in enumerate(windows))
    return KVCacheConfig(4, num_blocks, groups, num_host_blocks, max_chunk)


def make_manager(
    num_blocks: int = 6,
    windows: Sequence[int | None] = (None,),
    num_host_blocks: int = 0,
    max_chunk: int | None = None,
    *,
    caching: bool = True,
    **options: float,
) -> BlockSpaceManager:
    config = make_config(num_blocks, windows, num_host_blocks, max_chunk)
    return BlockSpaceManager(config, enable_prefix_caching=caching, **options)


def make_pool(num_blocks: int, tier: int = DEVICE) -> BlockPool:
    """A pool for one group, alone."""
    return BlockPool(num_blocks, 1, lambda *_: None, lambda *_: None, tier)


def do_step(manager: BlockSpaceManager, *seq_ids: int) -> tuple[BlockPairs, BlockPairs]:
    """A step with these sequences succeeds; returns the blocks copied out of the device tier, and into it."""
    transfers = manager.take_transfers(manager.step)
    manager.take_copies(seq_ids, manager.step)
    manager.settle(manager.step)
    return moved(transfers)


def copies(manager: BlockSpaceManager, seq_id: int) -> tuple[SlotCopy, ...]:
    """What a step with this sequence would copy first."""
    return tuple(manager._copies._waiting.get(seq_id, ()))


def moved(transfers: Sequence[Transfer]) -> tuple[BlockPairs, BlockPairs]:
    """The blocks copied out of the device tier, (device, host), and into it, (host, device)."""
    out, into = ([pair for t in transfers if t.source_tier == tier for pair in t.pairs] for tier in (0, 1))
    assert [t.source_tier for t in transfers] in ([], [0], [1], [0, 1]), "copies out come first"
    return tuple(out), tuple(into)


def compute(manager: BlockSpaceManager, seq_id: int, tokens: list[int], start: int, end: int) -> None:
    """A step in which a sequence that has blocks computes its tokens from `start` to `end`."""
    manager.append(seq_id, start, end)
    manager.check_integrity()
    do_step(manager, seq_id)
    manager.publish(seq_id, tokens, end)
    manager.check_integrity()


def run(
    manager: BlockSpaceManager, seq_id: int, tokens: list[int], key: ContentKey = NO_KEY, chunk: int | None = None
) -> int:
    """Start a sequence and compute all of it, `chunk` tokens in each step; returns what came from the cache."""
    manager.advance()
    cached = start = manager.allocate(manager.look_up(seq_id, tokens, key))
    while start < len(tokens):
        end = min(len(tokens), start + (chunk or len(tokens)))
        compute(manager, seq_id, tokens, start, end)
        start = end
        manager.advance()
    manager.publish_tail(seq_id, tokens, len(tokens))
    manager.check_integrity()
    return cached


def end(manager: BlockSpaceManager, *seq_ids: int) -> None:
    """The sequences have finished."""
    for seq_id in seq_ids:
        manager.free(seq_id)
        manager.forget(seq_id)
    manager.check_integrity()

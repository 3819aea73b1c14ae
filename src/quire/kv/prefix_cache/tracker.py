"""What the computed blocks of a pool contain, and how it is found."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, KeysView
from itertools import islice

import msgspec

from quire.kv.place import Place
from quire.kv.prefix_cache.content_hash import TOKEN_BYTES, BlockHash

MAX_TAIL_CANDIDATES = 64
"""Largest number of blocks that follow one prefix, the newest, that are searched for a common run of tokens."""
MAX_EVICTED_HASHES = 65536
"""Largest number of hashes that are remembered of evicted content, so that a miss can be explained."""


class BlockContent(msgspec.Struct, gc=False):
    """The known content of a block. There is one for each block of a cache, so it is small and quickly made."""

    group: int
    """The KV cache group, since the same tokens have other keys and values in each."""
    parent: BlockHash
    tokens: bytes
    """The computed tokens in it, in the form of HashChain.content."""
    depth: int
    """The number of blocks before it in its sequence."""
    block_hash: BlockHash | None
    """None for a partly full block, which can only be found as the tail of a prefix."""
    num_hits: int = 0
    """The number of lookups that found it."""
    salt: str = ""
    """The salt of its content key."""

    @property
    def num_tokens(self) -> int:
        """The number of computed tokens in it."""
        return len(self.tokens) // TOKEN_BYTES


OnChange = Callable[[int, BlockHash], None]
"""Is called with the depth and the hash of each full block that can be found now, or no longer."""


class BlockTracker:
    """Finds blocks by the hash of their content, and the blocks that follow a prefix by the prefix's hash.

    It does not know which sequences hold a block.
    """

    def __init__(self, num_groups: int, on_change: OnChange, tier: int) -> None:
        self._on_change = on_change
        self._tier = tier
        self._contents: dict[int, BlockContent] = {}
        self._by_hash: list[dict[BlockHash, int]] = [{} for _ in range(num_groups)]
        """By group and hash, the full block."""
        self._children: list[dict[BlockHash, int | dict[int, bytes]]] = [{} for _ in range(num_groups)]
        """By group and parent, the block that follows it or, if there were several, each of these with its tokens."""
        self._beginnings: dict[tuple[str, bytes], dict[BlockHash, None]] = {}
        """Of the first blocks of group 0: salt and tokens -> roots."""
        self.touched: set[int] | None = None
        """Blocks whose content has changed, while a live view is open; the view empties it. None without a view."""
        self.changed_hashes: list[BlockHash] | None = None
        """Hashes that `on_change` was called with, in order, while a PrefixChanges collects them."""

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._contents

    def __getitem__(self, block_id: int) -> BlockContent:
        return self._contents[block_id]

    def contents(self) -> Iterable[BlockContent]:
        """The content of all blocks, in no particular order."""
        return self._contents.values()

    def block_ids(self) -> Iterable[int]:
        """The blocks whose content is known, in the order of `contents`."""
        return self._contents.keys()

    def get(self, block_id: int) -> BlockContent | None:
        """The content of a block; None if it is unknown."""
        return self._contents.get(block_id)

    def count_hits(self, block_ids: Iterable[int]) -> None:
        """Count a lookup that found these blocks. Blocks that are still being computed have no counter."""
        for block_id in block_ids:
            content = self._contents.get(block_id)
            if content is not None:
                content.num_hits += 1
        if self.touched is not None:
            self.touched.update(block_ids)

    def add(self, block_id: int, content: BlockContent) -> None:
        """Record the content of a block whose tokens, or more of them than before, have been computed."""
        if block_id in self._contents:
            self.discard(block_id)
        self._contents[block_id] = content
        if self.touched is not None:
            self.touched.add(block_id)
        children = self._children[content.group]
        siblings = children.get(content.parent)
        if siblings is None:
            children[content.parent] = block_id
        elif isinstance(siblings, int):
            children[content.parent] = {siblings: self._contents[siblings].tokens, block_id: content.tokens}
        else:
            siblings[block_id] = content.tokens
        if content.block_hash is not None:
            self._by_hash[content.group][content.block_hash] = block_id
            self._change(content.depth, content.block_hash)
            if content.depth == 0 and content.group == 0:
                self._beginnings.setdefault((content.salt, content.tokens), {})[content.parent] = None

    def discard(self, block_id: int) -> None:
        """Forget the content of a block, if it is known."""
        if block_id in self._contents:
            self.pop(block_id)

    def pop(self, block_id: int) -> BlockContent:
        """Forget the content of a block, and return it."""
        content = self._contents.pop(block_id)
        if self.touched is not None:
            self.touched.add(block_id)
        children = self._children[content.group]
        siblings = children[content.parent]
        if siblings == block_id:
            del children[content.parent]
        else:
            assert isinstance(siblings, dict), f"block {block_id} is not in the prefix tree"
            del siblings[block_id]
            if not siblings:
                del children[content.parent]
        if content.block_hash is not None:
            del self._by_hash[content.group][content.block_hash]
            self._change(content.depth, content.block_hash)
            if content.depth == 0 and content.group == 0:
                beginning = content.salt, content.tokens
                del self._beginnings[beginning][content.parent]
                if not self._beginnings[beginning]:
                    del self._beginnings[beginning]
        return content

    def _change(self, depth: int, block_hash: BlockHash) -> None:
        self._on_change(depth, block_hash)
        if self.changed_hashes is not None:
            self.changed_hashes.append(block_hash)

    def hashes(self, group: int) -> KeysView[BlockHash]:
        """Those of the group's full blocks, always as they are now."""
        return self._by_hash[group].keys()

    def find(self, group: int, block_hash: BlockHash, tokens: bytes) -> Place | None:
        """The full block with this hash, if its tokens are equal too."""
        block_id = self._by_hash[group].get(block_hash)
        if block_id is None or self._contents[block_id].tokens != tokens:
            return None
        return Place(self._tier, block_id)

    def find_tail(self, group: int, parent: BlockHash, tokens: bytes) -> tuple[int, int] | None:
        """Of the blocks that follow this prefix, the one that begins with the most of `tokens`, and their number."""
        best: tuple[int, int] | None = None
        first, children = tokens[:TOKEN_BYTES], self._children[group].get(parent)
        if children is None:
            return None
        if isinstance(children, int):
            children = {children: self._contents[children].tokens}
        newest = [*islice(reversed(children.values()), MAX_TAIL_CANDIDATES)]
        if not [others for others in newest if others.startswith(first)]:  # as for most
            return None
        for block_id, others in islice(reversed(children.items()), MAX_TAIL_CANDIDATES):
            if not others.startswith(first):
                continue
            num_tokens = _common_tokens(others, tokens)
            if num_tokens > (best[1] if best else 0):
                best = (block_id, num_tokens)
        return best

    def other_root(self, root: BlockHash, salt: str, tokens: bytes) -> BlockHash | None:
        """Another root (another content key of this salt) under which a sequence begins with the full block `tokens`.
        Content under other salts must not show, not even as the reason why something else was not found."""
        return next((other for other in reversed(self._beginnings.get((salt, tokens), {})) if other != root), None)

    def check_integrity(self) -> None:
        """The indices agree with the contents, or AssertionError."""
        contents = self._contents.items()
        hashes = {(c.group, c.block_hash): b for b, c in contents if c.block_hash is not None}
        indexed = {(group, h): b for group, index in enumerate(self._by_hash) for h, b in index.items()}
        assert hashes == indexed, "the index by hash and the contents disagree"
        children = {(c.group, c.parent, b) for b, c in contents}
        tree = {
            (group, parent, block_id)
            for group, index in enumerate(self._children)
            for parent, blocks in index.items()
            for block_id in ([blocks] if isinstance(blocks, int) else blocks)
        }
        assert children == tree, "the prefix tree is wrong"
        full = [c for _, c in contents if c.block_hash is not None]
        beginnings = {((c.salt, c.tokens), c.parent) for c in full if c.depth == 0 and c.group == 0}
        assert beginnings == {(t, p) for t, roots in self._beginnings.items() for p in roots}, "beginnings are wrong"


class EvictedHashes:
    """Remembers the hashes of evicted content, the latest MAX_EVICTED_HASHES of them."""

    def __init__(self) -> None:
        self.most = MAX_EVICTED_HASHES
        """0: none is remembered, and misses are not explained."""
        self._hashes: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._hashes

    def add(self, block_hash: BlockHash) -> None:
        """Remember evicted content."""
        self._hashes[block_hash] = None
        if len(self._hashes) > self.most:
            self._hashes.popitem(last=False)

    def discard(self, block_hash: BlockHash) -> None:
        """Forget content that is cached again."""
        self._hashes.pop(block_hash, None)


def _common_tokens(a: bytes, b: bytes) -> int:
    """The number of whole tokens that two byte strings begin with in common."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length // TOKEN_BYTES
    low, high = 0, length // TOKEN_BYTES  # the first `low` tokens are equal, the first `high` are not
    while high - low > 1:
        middle = (low + high) // 2
        if a[: middle * TOKEN_BYTES] == b[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle
    return low

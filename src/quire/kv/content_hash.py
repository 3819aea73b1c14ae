"""Names for what is in a block: a chain of hashes, each over its parent's and the block's own tokens."""

import hashlib
import secrets
from array import array
from collections.abc import Sequence

BlockHash = bytes


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they are hashed and compared."""
    return array("q", tokens).tobytes()


class ContentHasher:
    """BLAKE2b (RFC 7693) under a secret key: nobody outside can make two prefixes collide, or foresee a hash."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def root(self, extra: bytes = b"") -> BlockHash:
        """What the first block's parent is called; `extra` is what else than tokens changes keys and values."""
        return hashlib.blake2b(extra, digest_size=16, key=self._key, person=b"root").digest()

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        """The hash of a full block with these `token_bytes` behind the block called `parent`."""
        return hashlib.blake2b(parent + tokens, digest_size=16, key=self._key).digest()


class HashChain:
    """The hashes of one sequence's full blocks, each worked out once in the sequence's life: O(length) in all."""

    __slots__ = ("_block_size", "_hasher", "_hashes")

    def __init__(self, hasher: ContentHasher, block_size: int, extra: bytes = b"") -> None:
        self._hasher = hasher
        self._block_size = block_size
        self._hashes = [hasher.root(extra)]

    def parent(self, index: int) -> BlockHash:
        """What stands before block `index`; the blocks up to it have been hashed."""
        return self._hashes[index]

    def block(self, index: int, token_ids: Sequence[int]) -> BlockHash:
        """The hash of the sequence's full block number `index`; `token_ids` are the sequence's from its beginning."""
        while len(self._hashes) < index + 2:
            start = (len(self._hashes) - 1) * self._block_size
            tokens = token_bytes(token_ids[start : start + self._block_size])
            self._hashes.append(self._hasher.child(self._hashes[-1], tokens))
        return self._hashes[index + 1]

    def fork(self) -> "HashChain":
        """The chain of a sequence that goes on from here on its own."""
        other = HashChain.__new__(HashChain)
        other._hasher, other._block_size, other._hashes = self._hasher, self._block_size, list(self._hashes)
        return other

"""Hashes that identify the content of blocks: each covers the parent block's hash and the block's own tokens."""

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BlockHash = bytes

TOKEN_BYTES = 8
"""Bytes of one token where tokens are hashed and compared."""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Return tokens as they are hashed and compared."""
    return array("q", tokens).tobytes()


@dataclass(frozen=True, slots=True)
class ContentKey:
    """What determines keys and values besides the tokens, or keeps equal content of different callers apart."""

    lora_id: str = ""
    """The digest of the LoRA adapter's content; empty for none."""
    cache_salt: str = ""
    """Requests with different salts share no blocks, so that timing reveals nothing about other requests."""
    media: tuple[tuple[int, bytes], ...] = ()
    """For each image or sound, in order: the position of its first placeholder token, and the hash of the item."""

    def root(self) -> bytes:
        """Return the parts that apply from the first token on, as unambiguous bytes."""
        lora_id = self.lora_id.encode()
        return len(lora_id).to_bytes(8) + lora_id + self.cache_salt.encode()


NO_KEY = ContentKey()


class ContentHasher:
    """BLAKE2b (RFC 7693) with a secret key, so that a client can neither construct a collision nor predict a hash."""

    def __init__(self, key: bytes | None = None) -> None:
        """Hashes with equal keys are equal in all processes; without a key, a new one is drawn."""
        self._key = secrets.token_bytes() if key is None else key
        self._keyed = hashlib.blake2b(digest_size=16, key=self._key)

    def root(self, extra: bytes) -> BlockHash:
        """Return the hash that stands for the parent of a first block; `extra` are the bytes of ContentKey.root."""
        return hashlib.blake2b(extra, digest_size=16, key=self._key, person=b"root").digest()

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        """Return the hash of a full block with these bytes, which follows the block with the hash `parent`."""
        state = self._keyed.copy()
        state.update(parent + tokens)
        return state.digest()

    def media(self, item_hash: bytes) -> bytes:
        """Return the bytes that replace an item's first placeholder token: a negative number, thus no token.

        BLAKE2b hashes the size of the digest as well, so that these are not the beginning of any block's hash.
        """
        digest = hashlib.blake2b(item_hash, digest_size=TOKEN_BYTES, key=self._key).digest()
        return digest[:-1] + bytes([digest[-1] | 0x80])


class HashChain:
    """The hashes of one sequence's full blocks. Each is computed once in the sequence's life, O(length) in all."""

    __slots__ = ("_block_size", "_hasher", "_hashes", "_tokens", "key", "looked_up")

    def __init__(self, hasher: ContentHasher, block_size: int, key: ContentKey = NO_KEY) -> None:
        self._hasher = hasher
        self._block_size = block_size
        self._hashes = [hasher.root(key.root())]
        self._tokens: list[bytes] = []
        self.key = key
        self.looked_up = False
        """Whether a lookup of this sequence has been counted."""

    def extend(self, num_blocks: int, token_ids: Sequence[int]) -> None:
        """Hash those of the first `num_blocks` full blocks that are not hashed yet. `token_ids`: the sequence's."""
        done, size = len(self._tokens), self._block_size
        if num_blocks <= done:
            return
        data, child = self.content(done * size, num_blocks * size, token_ids), self._hasher.child
        block_hash = self._hashes[-1]
        for start in range(0, len(data), TOKEN_BYTES * size):
            tokens = data[start : start + TOKEN_BYTES * size]
            block_hash = child(block_hash, tokens)
            self._tokens.append(tokens)
            self._hashes.append(block_hash)

    def adopt(self, hashes: Sequence[BlockHash], data: bytes) -> None:
        """Take over the hashes of the first full blocks, computed elsewhere with the same key, before any is hashed.
        `data` begins with their tokens, in the form of `content`."""
        size = TOKEN_BYTES * self._block_size
        self._tokens += [data[start : start + size] for start in range(0, size * len(hashes), size)]
        self._hashes += hashes

    def blocks(self) -> list[BlockHash]:
        """Return the hashes of all blocks that have been hashed."""
        return self._hashes[1:]

    def parent(self, index: int) -> BlockHash:
        """Return the hash of the block before block `index`; the blocks up to it have been hashed."""
        return self._hashes[index]

    def block(self, index: int) -> tuple[BlockHash, bytes]:
        """Return the hash and the content of block `index`, which has been hashed."""
        return self._hashes[index + 1], self._tokens[index]

    def has(self, index: int, block_hash: BlockHash) -> bool:
        """Return whether block `index` has been hashed and has this hash."""
        return index < len(self._tokens) and self._hashes[index + 1] == block_hash

    def content(self, start: int, end: int, token_ids: Sequence[int]) -> bytes:
        """Return the content from `start` to `end` as bytes: tokens, and media items in place of placeholders."""
        data = token_bytes(token_ids[start:end])
        for position, item_hash in self.key.media:
            if start <= position < end:
                place = (position - start) * TOKEN_BYTES
                data = data[:place] + self._hasher.media(item_hash) + data[place + TOKEN_BYTES :]
        return data

    def fork(self) -> "HashChain":
        """Return an equal chain, for a fork of the sequence."""
        other = HashChain.__new__(HashChain)
        other._hasher, other._block_size, other.key, other.looked_up = self._hasher, self._block_size, self.key, True
        other._hashes, other._tokens = list(self._hashes), list(self._tokens)
        return other

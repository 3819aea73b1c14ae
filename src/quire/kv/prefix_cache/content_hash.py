"""Names for what is in a block: a chain of hashes, each over its parent's and the block's own tokens."""

import hashlib
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

BlockHash = bytes

TOKEN_BYTES = 8
"""of one token in the bytes that are hashed and compared"""


def token_bytes(tokens: Sequence[int]) -> bytes:
    """Tokens as they are hashed and compared."""
    return array("q", tokens).tobytes()


@dataclass(frozen=True, slots=True)
class ContentKey:
    """What besides the tokens determines their keys and values, or keeps equal ones apart."""

    lora_id: str = ""
    """the adapter; empty for none"""
    cache_salt: str = ""
    """requests of different salts share nothing, so that nobody learns from timing what others asked"""
    media: tuple[tuple[int, bytes], ...] = ()
    """(position of its first placeholder token, hash of the item) for every image or sound, in order"""

    def root(self) -> bytes:
        """Unambiguous bytes of all that holds from the first token on."""
        lora_id = self.lora_id.encode()
        return len(lora_id).to_bytes(8, "little") + lora_id + self.cache_salt.encode()


NO_KEY = ContentKey()


class ContentHasher:
    """BLAKE2b (RFC 7693) under a secret key: nobody outside can make two prefixes collide, or foresee a hash."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._keyed = hashlib.blake2b(digest_size=16, key=self._key)

    def root(self, extra: bytes = b"") -> BlockHash:
        """What the first block's parent is called; `extra` is what else than tokens changes keys and values."""
        return hashlib.blake2b(extra, digest_size=16, key=self._key, person=b"root").digest()

    def child(self, parent: BlockHash, tokens: bytes) -> BlockHash:
        """The hash of a full block with these bytes behind the block called `parent`."""
        state = self._keyed.copy()
        state.update(parent)
        state.update(tokens)
        return state.digest()

    def media(self, item_hash: bytes) -> bytes:
        """What stands for an item in place of its first placeholder token: no token, since those are not negative."""
        digest = hashlib.blake2b(item_hash, digest_size=TOKEN_BYTES, key=self._key, person=b"media").digest()
        return digest[:-1] + bytes([digest[-1] | 0x80])


class HashChain:
    """The hashes of one sequence's full blocks, each worked out once in the sequence's life: O(length) in all."""

    __slots__ = ("_block_size", "_hasher", "_hashes", "_tokens", "key", "looked_up")

    def __init__(self, hasher: ContentHasher, block_size: int, key: ContentKey = NO_KEY) -> None:
        self._hasher = hasher
        self._block_size = block_size
        self._hashes = [hasher.root(key.root())]
        self._tokens: list[bytes] = []
        self.key = key
        self.looked_up = False
        """whether a lookup of this sequence has been counted"""

    def extend(self, num_blocks: int, token_ids: Sequence[int]) -> None:
        """Hash the first `num_blocks` full blocks, as far as it is not done; `token_ids` are all the sequence's."""
        done, size = len(self._tokens), self._block_size
        if num_blocks <= done:
            return
        data = self.content(done * size, num_blocks * size, token_ids)
        for start in range(0, len(data), TOKEN_BYTES * size):
            tokens = data[start : start + TOKEN_BYTES * size]
            self._tokens.append(tokens)
            self._hashes.append(self._hasher.child(self._hashes[-1], tokens))

    def parent(self, index: int) -> BlockHash:
        """What stands before block `index`; the blocks up to it have been hashed."""
        return self._hashes[index]

    def block(self, index: int) -> tuple[BlockHash, bytes]:
        """Hash and content of block `index`, which has been hashed."""
        return self._hashes[index + 1], self._tokens[index]

    def has(self, index: int, block_hash: BlockHash) -> bool:
        """Whether block `index` has been hashed and has this hash."""
        return index < len(self._tokens) and self._hashes[index + 1] == block_hash

    def content(self, start: int, end: int, token_ids: Sequence[int]) -> bytes:
        """Positions start to end as they are compared: tokens, and items of media in place of their placeholders."""
        data = token_bytes(token_ids[start:end])
        for position, item_hash in self.key.media:
            if start <= position < end:
                place = (position - start) * TOKEN_BYTES
                data = data[:place] + self._hasher.media(item_hash) + data[place + TOKEN_BYTES :]
        return data

    def fork(self) -> "HashChain":
        """The chain of a sequence that goes on from here on its own."""
        other = HashChain.__new__(HashChain)
        other._hasher, other._block_size, other.key, other.looked_up = self._hasher, self._block_size, self.key, True
        other._hashes, other._tokens = list(self._hashes), list(self._tokens)
        return other

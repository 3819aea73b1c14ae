"""Random numbers that depend on who asks, not on when: counter-based, as Salmon et al. 2011 propose."""

import struct
from hashlib import blake2b


def random_key(seed: int, index: int) -> bytes:
    """The key of the sequence number `index` of a request with this seed."""
    return blake2b(struct.pack("<qq", seed, index), digest_size=16).digest()


def uniform_bits(key: bytes, position: int) -> int:
    """53 random bits determined by a key and a position alone: BLAKE2b of the position under the key."""
    digest = blake2b(struct.pack("<q", position), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little") >> 11


def uniform(key: bytes, position: int) -> float:
    """`uniform_bits` as a fraction in [0, 1): the same alone, in any batch, and again after a preemption."""
    return uniform_bits(key, position) / 2**53

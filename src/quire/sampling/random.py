"""Random numbers that depend on who asks, not on when: counter-based, as Salmon et al. 2011 propose."""

import struct
from hashlib import blake2b


def uniform(key: bytes, position: int) -> float:
    """A number in [0, 1) determined by a sequence's key and a position alone.

    BLAKE2b of the position under the key, its first 53 bits as a fraction: the same request draws the same numbers
    alone, in any batch, and again after a preemption.
    """
    digest = blake2b(struct.pack("<q", position), digest_size=8, key=key).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53

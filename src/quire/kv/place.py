"""Where a block is: its tier, and its number there."""

from typing import NamedTuple

DEVICE = 0
"""The tier whose blocks the model reads and writes."""
HOST = 1
"""The tier of blocks in the host's memory, which is the nearest to the device."""


class Place(NamedTuple):
    """A block of one tier. A tier with a larger number is further from the device."""

    tier: int
    block_id: int

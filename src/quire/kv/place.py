"""Where a block is: its tier, and its number there."""

from typing import NamedTuple

DEVICE = 0
"""the tier whose blocks the model reads and writes"""
HOST = 1
"""the tier of the main memory's spare blocks, next to the device"""


class Place(NamedTuple):
    """A block of one tier. A tier with a larger number is further from the device."""

    tier: int
    block_id: int

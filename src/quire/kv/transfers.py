"""Copies between the tiers that the coming step is to make."""

from quire.batch import BlockPairs
from quire.kv.allocator import BlockAllocator


class Transfers:
    """Collects them while a step is planned, and keeps the blocks of the host tier that they read or write from being
    given to anybody else until the step has been committed: within a step, all copies out run before all copies in."""

    def __init__(self) -> None:
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self.held: list[int] = []
        """blocks of the host tier"""
        self.spilled: list[int] = []
        """of these, the ones whose cached content comes with the step"""

    def out(self, device_block: int, host_block: int) -> None:
        """From the device tier to the host's."""
        self._swap_out.append((device_block, host_block))

    def back(self, host_block: int, device_block: int) -> None:
        """From the host tier to the device's; the host block's hold passes to this object."""
        self._swap_in.append((host_block, device_block))
        self.held.append(host_block)

    def spill(self, device_block: int, host_block: int) -> None:
        """Keep a cached block's content in the host tier; the host block's hold passes to this object."""
        self._swap_out.append((device_block, host_block))
        self.held.append(host_block)
        self.spilled.append(host_block)

    def take(self) -> tuple[BlockPairs, BlockPairs]:
        """What is to be copied out and in, once."""
        taken = tuple(self._swap_out), tuple(self._swap_in)
        self._swap_out.clear()
        self._swap_in.clear()
        return taken

    def release(self, host: BlockAllocator) -> None:
        """The step is over."""
        for block_id in self.held:
            host.free(block_id)
        self.held.clear()
        self.spilled.clear()

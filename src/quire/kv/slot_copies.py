"""Copies of the first slots of a block into another one, from when they are planned until their step has succeeded."""

from collections import Counter
from collections.abc import Sequence

from quire.common.batch import SlotCopy
from quire.kv.block_pool import BlockPool

_CopiesBySequence = dict[int, list[SlotCopy]]


class SlotCopies:
    """Keeps the copies that sequences need before their next tokens are computed, and owns a hold on each source.

    The step whose batch contains a sequence takes its copies. They are done when that step is settled, and wait for
    another step if it is reverted.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.sources: Counter[int] = Counter()
        """By block, the number of copies that read it."""
        self._pool = pool
        self._waiting: _CopiesBySequence = {}
        self._taken: dict[int, _CopiesBySequence] = {}  # by step

    def __contains__(self, seq_id: int) -> bool:
        """Whether this sequence has copies that are not done."""
        return seq_id in self._waiting or any(seq_id in copies for copies in self._taken.values())

    def add(self, seq_id: int, copy: SlotCopy) -> None:
        """Plan a copy for a sequence. The caller's hold on the source passes to this object."""
        self._waiting.setdefault(seq_id, []).append(copy)
        self.sources[copy.src_block] += 1

    def take(self, seq_ids: Sequence[int], step: int) -> tuple[SlotCopy, ...]:
        """The copies that this step must do before it computes tokens of these sequences."""
        if not self._waiting:
            return ()
        taken = {seq_id: self._waiting.pop(seq_id) for seq_id in seq_ids if seq_id in self._waiting}
        self._taken.setdefault(step, {}).update(taken)
        return tuple([copy for copies in taken.values() for copy in copies])

    def settle(self, step: int) -> None:
        """The step has succeeded: its copies are done."""
        if step in self._taken:
            for copies in self._taken.pop(step).values():
                self._release(copies)

    def revert(self, step: int) -> None:
        """The step has failed: its copies wait for another one."""
        for seq_id, copies in self._taken.pop(step, {}).items():
            self._waiting[seq_id] = copies + self._waiting.get(seq_id, [])

    def drop(self, seq_id: int) -> None:
        """The sequence gives its blocks back: its copies are not needed."""
        for copies in (self._waiting, *self._taken.values()):
            self._release(copies.pop(seq_id, []))

    def _release(self, copies: list[SlotCopy]) -> None:
        for copy in copies:
            self._pool.free(copy.src_block)
            self.sources[copy.src_block] -= 1
            if not self.sources[copy.src_block]:
                del self.sources[copy.src_block]

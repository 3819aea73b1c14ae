"""Copies of a block's first slots are done once, by a step that succeeds, and hold their source until then."""

import pytest

from quire.common.batch import SlotCopy
from quire.kv.slot_copies import SlotCopies

from .managers import make_pool


@pytest.fixture
def pool():
    return make_pool(6)


@pytest.fixture
def plan(pool):
    """Plan a copy for a sequence, from a block that nothing else holds."""

    def plan(copies: SlotCopies, seq_id: int) -> SlotCopy:
        copy = SlotCopy(0, pool.allocate(), 5, 2)
        copies.add(seq_id, copy)
        return copy

    return plan


def test_a_sequence_has_copies_until_the_step_that_takes_them_has_succeeded(pool, plan):
    copies = SlotCopies(pool)
    first, second = plan(copies, 1), plan(copies, 2)
    assert (1 in copies, 2 in copies, 3 in copies) == (True, True, False)
    assert copies.take([1, 3], 7) == (first,)
    assert (1 in copies, 2 in copies, 3 in copies) == (True, True, False)
    assert copies.take([1, 2], 8) == (second,)
    assert copies.take([1, 2], 9) == ()
    copies.settle(7)
    assert (1 in copies, 2 in copies) == (False, True)
    assert pool.num_free_blocks == 5
    copies.settle(8)
    assert (copies.sources, pool.num_free_blocks) == ({}, 6)


def test_copies_of_a_failed_step_wait_before_those_planned_since(pool, plan):
    copies = SlotCopies(pool)
    first = plan(copies, 1)
    assert copies.take([1], 7) == (first,)
    second = plan(copies, 1)
    copies.revert(8)
    copies.revert(7)
    assert 1 in copies
    assert copies.take([1], 9) == (first, second)
    copies.settle(9)
    assert 1 not in copies
    assert pool.num_free_blocks == 6


def test_a_sequence_that_ends_releases_the_sources_of_all_its_copies(pool, plan):
    copies = SlotCopies(pool)
    plan(copies, 1)
    copies.take([1], 7)
    plan(copies, 1)
    other = plan(copies, 2)
    copies.drop(1)
    copies.drop(3)
    assert 1 not in copies
    assert copies.sources == {other.src_block: 1}
    copies.revert(7)
    assert copies.take([1, 2], 8) == (other,)
    assert pool.num_free_blocks == 5

"""Sequences are moved between the tiers only where all their blocks fit, and come back only with room to go on."""

import pytest

from .managers import do_step, end, make_manager, run


def swapped_out(num_others: int = 0, num_blocks: int = 12, **options):
    """A manager in which a sequence of six tokens and its fork are in the host tier, and another has device blocks."""
    manager = make_manager(num_blocks, num_host_blocks=8, **{"watermark": 0.0} | options)
    run(manager, 0, [1] * 6)
    manager.fork(0, 1)
    manager.advance()
    manager.swap_out([0, 1])
    do_step(manager)
    if num_others:
        run(manager, 2, [2] * (4 * num_others))
    manager.check_integrity()
    return manager


@pytest.mark.parametrize(("num_host_blocks", "fits"), [(1, False), (2, True)])
def test_a_sequence_is_swapped_out_only_if_all_its_blocks_fit(num_host_blocks, fits):
    manager = make_manager(num_host_blocks=num_host_blocks)
    run(manager, 0, [1] * 6)
    assert manager.can_swap_out([0]) is fits


def test_a_sequence_that_waits_for_a_copy_is_not_swapped_out():
    manager = make_manager(12, num_host_blocks=8)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    manager.advance()
    manager.allocate(manager.look_up(1, [1, 2, 3, 4, 5, 6, 7]))
    manager.append(1, 6, 7)
    assert not manager.can_swap_out([1])
    assert not manager.can_swap_out([0, 1])
    do_step(manager, 1)
    assert manager.can_swap_out([1])


def test_after_a_swap_or_a_fork_no_sequence_is_known_to_have_room():
    manager = make_manager(12, num_host_blocks=8)
    run(manager, 0, [1] * 6)
    assert manager.has_room(0, 8)
    assert not manager.has_room(0, 9)
    manager.fork(0, 1)
    assert not manager.has_room(0, 1)
    assert not manager.has_room(1, 1)
    manager.append(0, 6, 7)
    assert manager.has_room(0, 8)
    do_step(manager, 0)
    manager.swap_out([0])
    assert not manager.has_room(0, 1)


@pytest.mark.parametrize(("num_others", "has_room"), [(0, True), (7, True), (8, False), (9, False)])
def test_a_block_for_each_table_stays_free_where_others_run(num_others, has_room):
    """Two blocks in the host tier, one more for the fork's own last block, and one for each of the two tables."""
    manager = swapped_out(num_others)
    assert manager.can_swap_in([0, 1], 6) is has_room


@pytest.mark.parametrize(("num_others", "has_room"), [(6, True), (7, False)])
def test_the_reserve_stays_free_as_well(num_others, has_room):
    manager = swapped_out(num_others, watermark=0.1)
    assert manager.can_swap_in([0, 1], 6) is has_room


def test_sequences_that_take_the_whole_cache_come_back_when_it_is_empty():
    manager = make_manager(3, num_host_blocks=8)
    run(manager, 0, [1, 2, 3, 4, 5, 6])
    run(manager, 1, [1, 2, 3, 4, 9, 9])
    manager.advance()
    manager.swap_out([0, 1])
    do_step(manager)
    assert manager.can_swap_in([0, 1], 8)
    assert not manager.can_swap_in([0, 1], 9), "each needs another block"
    manager.swap_in([0, 1])
    assert len(do_step(manager)[1]) == 3
    manager.check_integrity()
    end(manager, 0, 1)


def test_what_pins_leave_is_all_that_a_sequence_has_to_fit_into():
    manager = make_manager(8, num_host_blocks=8, pinned_fraction=0.5)
    run(manager, 0, [1] * 16)
    manager.advance()
    manager.swap_out([0])
    run(manager, 1, [2] * 16)
    manager.pins.pin([2] * 16)
    end(manager, 1)
    assert manager.pool.num_free_blocks == 4
    assert manager.can_swap_in([0], 16)
    assert not manager.can_swap_in([0], 17)

"""New sequences leave a reserve of blocks to those that run, so that these can grow."""

import pytest

from quire.kv.block_space_manager import AllocStatus

from .managers import end, make_manager, run


def status(manager, num_blocks, seq_id=9):
    return manager.can_allocate(manager.look_up(seq_id, [9] * (4 * num_blocks)))


@pytest.mark.parametrize(("watermark", "reserve"), [(0.0, 0), (0.1, 1), (0.29, 2), (0.3, 3)])
def test_a_new_sequence_waits_if_it_would_take_the_reserve(watermark, reserve):
    manager = make_manager(10, watermark=watermark)
    run(manager, 0, [1] * 16)
    assert status(manager, 6 - reserve) is AllocStatus.OK
    assert status(manager, 7 - reserve, seq_id=8) is AllocStatus.LATER


def test_the_first_sequence_needs_to_leave_no_reserve():
    manager = make_manager(10, watermark=0.3)
    assert status(manager, 10) is AllocStatus.OK
    assert status(manager, 11, seq_id=8) is AllocStatus.NEVER
    run(manager, 0, [1] * 16)
    assert status(manager, 10, seq_id=7) is AllocStatus.LATER
    end(manager, 0)
    assert status(manager, 10, seq_id=6) is AllocStatus.OK


@pytest.mark.parametrize(
    ("num_tokens", "num_left", "expected"), [(12, 2, True), (12, 3, False), (20, 0, True), (13, 2, False)]
)
def test_a_sequence_that_grows_can_leave_blocks_of_each_kind_of_layer(num_tokens, num_left, expected):
    """With 4 tokens it has 2 of 10 blocks, one for each of two kinds of layers."""
    manager = make_manager(10, windows=(None, 40))
    run(manager, 0, [1] * 4)
    assert manager.can_append(0, 4, num_tokens, num_left) is expected

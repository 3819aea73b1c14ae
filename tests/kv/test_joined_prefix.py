"""A sequence shares blocks that another computes in the same step, and waits for those that come later."""

from quire.kv.place import DEVICE, Place
from quire.kv.prefix_cache.stats import HitSource

from .managers import compute, copies, do_step, end, make_manager, run

TOKENS = list(range(13))


def computing(num_tokens: int, **options):
    """A manager in whose planned step sequence 0 computes the first tokens of TOKENS."""
    manager = make_manager(12, **options)
    manager.advance()
    manager.allocate(manager.look_up(0, TOKENS))
    manager.append(0, 0, num_tokens)
    return manager


def test_the_blocks_that_are_full_at_the_end_of_the_step_are_joined():
    manager = computing(8)
    hit = manager.look_up(1, TOKENS)
    assert hit.places == ([Place(DEVICE, block_id) for block_id in manager.block_tables(0)[0][:2]],)
    assert (hit.num_blocks, hit.num_ready_blocks, hit.needs_step) == (2, 0, True)
    assert hit.num_by_source == {HitSource.JOINED: 2, HitSource.DEVICE: 0, HitSource.HOST: 0}
    assert hit.is_awaited, "the third block is computed in a later step"
    assert hit.is_settled is False
    assert manager.allocate(hit) == 8
    manager.append(1, 8, 13)
    manager.check_integrity()
    do_step(manager, 0, 1)
    manager.publish(0, TOKENS, 8)
    manager.publish(1, TOKENS, 13)
    end(manager, 0, 1)


def test_a_sequence_whose_blocks_were_joined_keeps_them_when_drafts_follow():
    """Its first block is partly copied. No other copy may take its place, since the other sequence reads this one."""
    manager = make_manager(12)
    run(manager, 0, TOKENS[:3])
    manager.advance()
    assert manager.allocate(manager.look_up(1, TOKENS)) == 3
    manager.append(1, 3, 12)
    hit = manager.look_up(2, TOKENS)
    assert hit.num_blocks == 3
    assert manager.allocate(hit) == 12
    before, waiting = list(manager.block_tables(1)[0]), copies(manager, 1)
    assert manager.can_append(1, 3, 16, num_left=manager.pool.num_free_blocks - 1)
    manager.append(1, 3, 16)
    assert list(manager.block_tables(1)[0][:3]) == before == list(manager.block_tables(2)[0])
    assert copies(manager, 1) == waiting
    manager.append(2, 12, 13)
    manager.check_integrity()
    do_step(manager, 0, 1, 2)
    manager.publish(1, TOKENS, 12)
    manager.publish(2, TOKENS, 13)
    end(manager, 0, 1, 2)


def test_a_block_that_is_not_full_by_then_is_awaited():
    manager = computing(7)
    hit = manager.look_up(1, TOKENS)
    assert (hit.num_blocks, hit.is_awaited) == (1, True)
    hit = manager.look_up(2, TOKENS[:5])
    assert (hit.num_blocks, hit.is_awaited) == (1, False), "it needs no more"


def test_nothing_of_a_step_that_is_over_is_joined_before_it_is_published():
    manager = computing(8)
    do_step(manager, 0)
    assert (manager.look_up(1, TOKENS).num_blocks, manager.look_up(1, TOKENS).is_awaited) == (0, True)
    manager.publish(0, TOKENS, 8)
    hit = manager.look_up(1, TOKENS)
    assert (hit.num_blocks, hit.num_ready_blocks, hit.is_awaited) == (2, 2, True)


def test_nothing_of_a_failed_step_is_joined():
    manager = computing(8)
    manager.revert(manager.step)
    assert (manager.look_up(1, TOKENS).num_blocks, manager.look_up(1, TOKENS).is_awaited) == (0, True)
    manager.advance()
    assert manager.look_up(1, TOKENS).num_blocks == 0, "it has no part in the next step yet"
    manager.append(0, 0, 8)
    assert manager.look_up(1, TOKENS).num_blocks == 2


def test_each_published_block_leaves_the_others_announced():
    manager = computing(4)
    compute(manager, 0, TOKENS, 0, 4)
    hit = manager.look_up(1, TOKENS)
    assert (hit.num_blocks, hit.is_awaited) == (1, True)


def test_a_swapped_out_sequence_is_not_waited_for():
    manager = computing(8, num_host_blocks=4)
    compute(manager, 0, TOKENS, 0, 8)
    assert manager.look_up(1, TOKENS).is_awaited
    manager.advance()
    manager.swap_out([0])
    assert not manager.look_up(1, TOKENS).is_awaited
    manager.check_integrity()


def test_a_preempted_sequence_announces_the_blocks_that_its_new_tokens_fill():
    manager = make_manager(12)
    run(manager, 0, TOKENS[:6])
    manager.free(0)
    manager.advance()
    manager.allocate(manager.look_up(0, TOKENS))
    manager.append(0, 6, 13)
    assert manager.look_up(1, TOKENS).num_blocks == 3
    manager.check_integrity()

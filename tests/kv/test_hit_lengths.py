"""A waiting sequence is looked up again only after a change that can concern it. That the remembered length is always
that of a lookup is an invariant of test_block_manager_stateful.py."""

import pytest

from tests.engine.fake import Harness

from .managers import compute, end, make_manager, run


@pytest.fixture
def lookups(monkeypatch):
    """A function: the sequences looked up since it was called last."""
    found: list[int] = []

    def watch(manager):
        lookup = manager.prefixes.lookup
        find = lookup.find
        monkeypatch.setattr(lookup, "find", lambda seq_id, *rest: found.append(seq_id) or find(seq_id, *rest))

        def take():
            taken = found.copy()
            found.clear()
            return taken

        return take

    return watch


def test_a_queue_of_requests_costs_no_lookups_while_nothing_changes(lookups):
    harness = Harness(num_blocks=13, block_size=16, policy="prefix", prefix_max_delay_s=1e6, max_num_batched_tokens=99)
    shared = [1] * 48
    harness.add(shared, 1)
    harness.run()
    harness.add([2] * 90, 60)
    harness.step()
    for index in range(20):
        harness.add([*shared, *[3] * 70, index], 4)
    taken = lookups(harness.blocks)
    harness.step()
    assert len(taken()) == 20 + 1, "each once for the order, and the first to start it"
    for _ in range(3):
        harness.step()
        assert len(taken()) == 1, "the first, which finds no room"


def test_what_is_published_or_evicted_is_looked_up_again_only_by_those_that_it_concerns(lookups):
    manager = make_manager(6)
    run(manager, 0, [1] * 8)
    end(manager, 0)
    one, two = [*[1] * 8, 5, 5, 5, 5, 5], [2] * 9
    taken = lookups(manager)
    for _ in range(2):
        assert (manager.num_cached_tokens(1, one), manager.num_cached_tokens(2, two)) == (8, 0)
        assert taken() in ([1, 2], [])
    manager.advance()
    manager.allocate(manager.look_up(3, two))
    taken()
    assert (manager.num_cached_tokens(1, one), manager.num_cached_tokens(2, two)) == (8, 0)
    assert taken() == [2], "its blocks were announced"
    compute(manager, 3, two, 0, 9)
    assert (manager.num_cached_tokens(1, one), manager.num_cached_tokens(2, two)) == (8, 8)
    assert taken() == [2], "its blocks were published"
    manager.append(3, 9, 20)  # takes the last free block, and a cached one
    assert (manager.num_cached_tokens(1, one), manager.num_cached_tokens(2, two)) == (4, 8)
    assert taken() == [1], "a block of it was evicted"

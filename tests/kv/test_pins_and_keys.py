"""What is pinned stays, within a quota; what differs in its key shares nothing; a miss has a reason."""

import pytest

from quire.common.errors import RequestError
from quire.engine.requests.sequence import SequenceStatus
from quire.kv.block_space_manager import AllocStatus
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from quire.kv.prefix_cache.stats import HitSource, MissReason
from tests.engine.fake import Harness, expected_output

from .managers import compute, end, make_manager, run

PREFIX = [1] * 10  # two blocks and a half


# Pins


def pin_prefix(num_blocks: int = 12, pinned_fraction: float = 0.5, **options):
    """A manager that has computed PREFIX, and the pin on it."""
    manager = make_manager(num_blocks, pinned_fraction=pinned_fraction, **options)
    run(manager, 0, PREFIX)
    end(manager, 0)
    return manager, manager.pins.pin(PREFIX)


@pytest.mark.essential
def test_a_pinned_prefix_survives_the_pressure_of_others():
    manager, pin = pin_prefix()
    assert (pin.num_tokens, pin.num_blocks) == (10, 3)
    assert manager.num_used_blocks == manager.pins.num_blocks == 3
    for seq_id in range(1, 6):
        run(manager, seq_id, [1 + seq_id] * 36)  # all that is left
        end(manager, seq_id)
    assert run(manager, 9, [*PREFIX, 2]) == 10


def test_what_is_unpinned_is_evicted_like_any_other():
    manager, pin = pin_prefix()
    manager.pins.unpin(pin.pin_id)
    assert manager.num_used_blocks == 0
    run(manager, 1, [2] * 48)
    end(manager, 1)
    assert run(manager, 2, [*PREFIX, 2]) == 0
    with pytest.raises(RequestError, match=rf"pin {pin.pin_id} is unknown, or unpinned already"):
        manager.pins.unpin(pin.pin_id)


def test_blocks_of_two_pins_are_counted_once_and_stay_until_both_are_gone():
    manager, first = pin_prefix()
    second = manager.pins.pin(PREFIX[:8])
    assert manager.pins.num_blocks == 3
    manager.pins.unpin(first.pin_id)
    assert manager.pins.num_blocks == 2
    run(manager, 1, [2] * 40)
    end(manager, 1)
    assert run(manager, 2, [*PREFIX, 2]) == 8
    manager.pins.unpin(second.pin_id)
    end(manager, 2)
    assert manager.num_used_blocks == 0


def test_a_pin_beyond_the_quota_is_refused_and_says_what_would_help():
    manager, _ = pin_prefix(pinned_fraction=0.4)
    run(manager, 1, [2] * 8)
    with pytest.raises(RequestError) as error:
        manager.pins.pin([2] * 8)
    assert str(error.value) == (
        "pinning this prefix takes 2 more blocks, and 3 of at most 4 are pinned: unpin others, or raise pinned_fraction"
    )
    with pytest.raises(RequestError, match="takes 2 more blocks"):
        manager.pins.check([2] * 8)
    assert manager.pins.pin([2] * 4).num_blocks == 1


def test_nothing_is_pinned_without_a_prefix_cache():
    manager = make_manager(12, caching=False, pinned_fraction=0.5)
    for ask in (manager.pins.pin, manager.pins.check):
        with pytest.raises(RequestError, match="only with enable_prefix_caching"):
            ask(PREFIX)


def test_only_what_is_computed_is_pinned():
    manager = make_manager(12, pinned_fraction=0.5)
    manager.advance()
    manager.allocate(manager.look_up(0, PREFIX))
    compute(manager, 0, PREFIX, 0, 6)
    pin = manager.pins.pin(PREFIX)
    assert (pin.num_tokens, pin.num_blocks) == (4, 1)


def test_a_pin_takes_nothing_from_the_host_tier():
    """A prefix shorter than the one found needs other blocks of a window, and those may be in the host tier."""
    manager = make_manager(6, (4,), num_host_blocks=6, pinned_fraction=0.5)
    run(manager, 0, [1] * 16, chunk=4)
    end(manager, 0)
    run(manager, 1, [2] * 24)  # all of the device tier
    end(manager, 1)
    assert manager.look_up(2, [1] * 17).needs_step
    pin = manager.pins.pin([1] * 16)
    assert (pin.num_tokens, pin.num_blocks) == (0, 0)
    manager.check_integrity()


def test_the_quota_counts_what_is_held_while_the_end_is_not_computed():
    """The window behind 12 tokens shows one block of them, but the one behind 8 two with the partly full one."""
    manager = make_manager(10, (5, None), pinned_fraction=0.4)
    run(manager, 0, PREFIX)
    manager.pins.check([1] * 12)
    with pytest.raises(RequestError, match="takes 5 more blocks, and 0 of at most 4 are pinned"):
        manager.pins.pin([1] * 12)


def test_a_window_is_held_from_the_last_whole_block_on():
    """The token behind 11 reads 8 to 10, but a prefix that ends with the second block needs that one as well."""
    manager = make_manager(10, (4,), pinned_fraction=0.1)
    with pytest.raises(RequestError, match="takes 2 more blocks, and 0 of at most 1 are pinned"):
        manager.pins.check([1] * 11)


def test_a_quarter_of_the_cache_may_be_pinned_by_default():
    assert make_manager(12).pins.max_blocks == 3


def test_a_partly_full_block_with_an_item_is_pinned():
    manager, key = make_manager(12, pinned_fraction=0.5), ContentKey(media=((9, b"cat"),))
    run(manager, 0, PREFIX, key)
    assert manager.pins.pin(PREFIX, key).num_tokens == 10
    assert manager.pins.pin(PREFIX).num_tokens == 9


def test_a_request_that_never_fits_because_of_pins_ends_with_the_reason():
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    harness.add([1] * 8, 1)
    harness.run()
    harness.blocks.pins.pin([1] * 8)
    too_long, fine = harness.add([2] * 17, 1), harness.add([3] * 12, 1)
    assert harness.step().ignored == (too_long.request_id,)
    assert too_long.seqs[0].status is SequenceStatus.FINISHED_IGNORED
    assert too_long.error == ("17 tokens never fit into the KV cache of 24 tokens while 2 of its 6 blocks are pinned")
    harness.check_output(fine)


def test_a_request_that_begins_with_the_pinned_prefix_is_not_hindered_by_it():
    manager, _ = pin_prefix(num_blocks=6)
    assert manager.can_allocate(manager.look_up(1, [*PREFIX, *[2] * 10])) is AllocStatus.OK
    assert manager.can_allocate(manager.look_up(2, [2] * 20)) is AllocStatus.NEVER


def test_a_running_sequence_that_cannot_grow_because_of_pins_ends_with_what_it_has():
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    harness.add([1] * 8, 1)
    harness.run()
    harness.blocks.pins.pin([1] * 8)
    group = harness.add([2] * 12, 20)
    while not group.is_finished:
        harness.step()
    assert group.seqs[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert harness.output(group) == expected_output([2] * 12, 5)
    assert group.error == (
        "stopped after 5 tokens: 17 tokens and one more do not fit into the 6 blocks of the KV cache, of which 2 are "
        "pinned"
    )
    assert not harness.requests


def test_a_parked_sample_for_which_pins_leave_no_room_ends_with_what_it_has():
    harness = Harness(num_blocks=10, max_num_batched_tokens=64, pinned_fraction=0.9)
    group = harness.add([1] * 13, 12, n=3)
    while not any(seq.status.is_finished for seq in group.seqs):
        harness.step()
    finished = [seq for seq in group.seqs if seq.status.is_finished]
    (parked,) = [seq for seq in group.seqs if not seq.status.is_finished]
    assert parked.status is SequenceStatus.WAITING
    for seq in finished:
        harness.blocks.pins.pin(seq.token_ids[:24])
    for _ in range(3):
        harness.step()
    assert parked.status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert group.is_finished
    assert "of which 9 are pinned" in group.error
    assert not harness.requests


# Keys

CAT, DOG = ((2, b"cat"),), ((2, b"dog"),)
KEYS = [
    NO_KEY,
    ContentKey(cache_salt="a"),
    ContentKey(cache_salt="b"),
    ContentKey(lora_id="a"),
    ContentKey(lora_id="a", cache_salt="a"),
    ContentKey(lora_id="aa"),
    ContentKey(media=CAT),
    ContentKey(media=DOG),
    ContentKey(media=CAT, cache_salt="a"),
]


@pytest.mark.parametrize("key", KEYS)
def test_equal_keys_share_and_different_ones_do_not(key):
    manager = make_manager(40)
    num_shared_tokens = 0
    for seq_id, other in enumerate(KEYS):
        if other != key:
            run(manager, seq_id, PREFIX, other)
    root = (key.lora_id, key.cache_salt)
    if any(other != key and (other.lora_id, other.cache_salt) == root for other in KEYS):
        num_shared_tokens = 2  # what comes before the first item does not depend on it
    assert run(manager, 100, PREFIX, key) == num_shared_tokens
    assert run(manager, 101, PREFIX, ContentKey(key.lora_id, key.cache_salt, key.media)) == 9


def test_items_at_other_places_are_other_content():
    manager = make_manager(20)
    run(manager, 0, PREFIX, ContentKey(media=((2, b"cat"), (6, b"dog"))))
    assert run(manager, 1, PREFIX, ContentKey(media=((2, b"cat"), (6, b"cat")))) == 6
    assert run(manager, 2, PREFIX, ContentKey(media=((3, b"cat"), (6, b"dog")))) == 2


@pytest.mark.parametrize("key", KEYS)
def test_a_prefix_is_pinned_under_its_key(key):
    manager = make_manager(20, pinned_fraction=0.5)
    run(manager, 0, PREFIX, ContentKey(cache_salt="else"))
    run(manager, 1, PREFIX, key)
    pinned = manager.pins.block_ids[manager.pins.pin(PREFIX, key).pin_id]
    assert pinned == manager.block_tables(1)[0].tolist()


# Reasons


def missed(manager, seq_id: int, tokens: list[int], key: ContentKey = NO_KEY) -> dict[MissReason, int]:
    """The reasons of one sequence's misses, with their tokens."""
    before = dict(manager.stats.num_missed_tokens)
    manager.allocate(manager.look_up(seq_id, tokens, key))
    return {reason: n - before[reason] for reason, n in manager.stats.num_missed_tokens.items() if n > before[reason]}


def test_a_prefix_that_was_never_sent_before():
    manager = make_manager(12)
    run(manager, 0, [1] * 8)
    assert missed(manager, 1, [1] * 8 + [2] * 6) == {MissReason.NEVER_SEEN: 5}


def test_it_was_evicted():
    manager = make_manager(6)
    run(manager, 0, [1] * 12)
    end(manager, 0)
    run(manager, 1, [2] * 20)  # leaves one block of the first, and takes two
    end(manager, 1)
    assert missed(manager, 2, [1] * 13) == {MissReason.EVICTED: 8}
    assert manager.stats.num_block_hit_tokens[HitSource.DEVICE] == 4


def test_it_is_computed_again_after_an_eviction_and_no_longer_counts_as_evicted():
    manager = make_manager(3)
    for seq_id, token_id in enumerate((1, 2, 1)):
        run(manager, seq_id, [token_id] * 12)
        end(manager, seq_id)
    assert missed(manager, 3, [1] * 9) == {}
    assert manager.prefixes.chains[3].block(0)[0] not in manager.tiers.evicted


def test_the_memory_of_what_was_evicted_has_an_end(monkeypatch):
    monkeypatch.setattr("quire.kv.prefix_cache.tracker.MAX_EVICTED_HASHES", 2)
    manager = make_manager(3)
    for seq_id, token_id in enumerate((1, 2)):
        run(manager, seq_id, [token_id] * 12)
        end(manager, seq_id)
    # the deepest was evicted, and forgotten, first
    assert missed(manager, 2, [1] * 13) == {MissReason.EVICTED: 8, MissReason.NEVER_SEEN: 4}


@pytest.mark.parametrize("salt", ["", "ours"])
def test_it_is_there_under_another_key(salt):
    manager = make_manager(12)
    run(manager, 0, [1] * 8, ContentKey(cache_salt=salt))
    key = ContentKey(lora_id="mine", cache_salt=salt)
    assert missed(manager, 1, [1] * 8 + [2] * 5, key) == {MissReason.OTHER_KEY: 8, MissReason.NEVER_SEEN: 4}


def test_blocks_that_are_there_under_another_key_count_behind_those_of_its_own():
    manager = make_manager(12)
    tokens = list(range(13))
    run(manager, 0, tokens[:12], ContentKey(lora_id="theirs"))
    run(manager, 1, tokens[:4], ContentKey(lora_id="mine"))
    assert missed(manager, 2, tokens, ContentKey(lora_id="mine")) == {MissReason.OTHER_KEY: 8}


def test_it_is_there_under_another_key_as_long_as_one_of_them_is_left():
    manager = make_manager(3)
    for seq_id, lora_id in enumerate("ab"):
        run(manager, seq_id, [1] * 4, ContentKey(lora_id=lora_id))
        end(manager, seq_id)
    for seq_id, num_evicting, reason in ((2, 8, MissReason.OTHER_KEY), (4, 12, MissReason.NEVER_SEEN)):
        run(manager, seq_id, [seq_id] * num_evicting)
        end(manager, seq_id)
        assert missed(manager, seq_id + 1, [1] * 5, ContentKey(lora_id="c")) == {reason: 4}
        end(manager, seq_id + 1)


@pytest.mark.essential
@pytest.mark.parametrize(("theirs", "mine"), [("", "mine"), ("theirs", "mine"), ("theirs", "")])
def test_a_client_cannot_learn_what_is_cached_under_another_salt(theirs, mine):
    """The reasons are counted in metrics: they would tell whether somebody else has sent these tokens."""
    manager = make_manager(12)
    run(manager, 0, [1] * 8, ContentKey(cache_salt=theirs))
    assert missed(manager, 1, [1] * 13, ContentKey(cache_salt=mine)) == {MissReason.NEVER_SEEN: 12}


def test_another_request_is_computing_it():
    manager = make_manager(12)
    manager.advance()
    manager.allocate(manager.look_up(0, [1] * 12))
    assert missed(manager, 1, [1] * 13) == {MissReason.NOT_COMPUTED: 12}


def test_hits_and_misses_are_all_that_was_looked_up():
    manager = make_manager(6, num_host_blocks=2)
    for seq_id, tokens in enumerate(([1] * 9, [1] * 9, [2] * 20, [1] * 7 + [3] * 5, [2] * 9)):
        run(manager, seq_id, tokens)
        end(manager, seq_id)
    stats = manager.stats.to_dict()
    assert stats["queried"] == 8 + 8 + 19 + 11 + 8
    assert stats["queried"] == stats["hit"] + sum(n for name, n in stats.items() if name.startswith("missed_"))
    assert stats["hit"] == sum(n for name, n in stats.items() if name.startswith("hit_"))

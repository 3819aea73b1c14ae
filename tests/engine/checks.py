"""What every test of scheduling and block accounting relies on, in one function that stops at the first failure."""

import random

import pytest

from quire.common.errors import RequestError
from quire.config.scheduler import POLICIES
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from quire.kv.prefix_cache.evictor import LRUEvictor
from tests.kv.managers import end, make_manager, run

from .fake import Harness

NUM_SEEDS = 60
KEYS = [NO_KEY, NO_KEY, ContentKey(cache_salt="salt")]


def check_eviction() -> None:
    """Oldest step first, in it the deepest; what is used again is young again."""
    evictor = LRUEvictor()
    for block_id, age, depth in [(0, 1, 0), (1, 1, 2), (2, 1, 1), (3, 2, 9)]:
        evictor.add(block_id, age, depth)
    assert [evictor.evict() for _ in range(4)] == [1, 2, 0, 3], "order of eviction"
    manager = make_manager(6)
    for seq_id, token_id in enumerate((1, 2, 1)):
        run(manager, seq_id, [token_id] * 9)
        end(manager, seq_id)
    run(manager, 3, [3] * 9)
    assert manager.look_up(4, [1] * 9).num_blocks == 2, "what was used last is evicted"


def check_progress() -> None:
    """One request alone comes to its end."""
    harness = Harness()
    group = harness.add([1] * 6, 3)
    harness.run()
    harness.check_output(group)


def check_keys() -> None:
    """Neither salts nor media share."""
    manager = make_manager(20)
    run(manager, 0, [1] * 9)
    run(manager, 1, [1] * 9, ContentKey(media=((0, b"cat"),)))
    for seq_id, key in ((2, ContentKey(cache_salt="salt")), (3, ContentKey(media=((0, b"dog"),)))):
        assert manager.look_up(seq_id, [1] * 9, key).num_blocks == 0, f"found under {key}"


def check_pins() -> None:
    """Held until unpinned, once."""
    manager = make_manager(6, pinned_fraction=0.5)
    run(manager, 0, [1] * 9)
    end(manager, 0)
    pin = manager.pins.pin([1] * 8)
    manager.check_integrity()
    run(manager, 1, [2] * 16)
    end(manager, 1)
    assert manager.look_up(2, [1] * 9).num_blocks == 2, "a pinned prefix is gone"
    manager.pins.unpin(pin.pin_id)
    manager.check_integrity()
    with pytest.raises(RequestError, match="unpinned already"):
        manager.pins.unpin(pin.pin_id)


def check_joins() -> None:
    """Blocks are joined only in the step that computes them."""
    manager = make_manager(6)
    manager.advance()
    manager.allocate(manager.look_up(0, [1] * 9))
    manager.append(0, 0, 8)
    assert manager.look_up(1, [1] * 9).num_blocks == 2, "a block of this step is not joined"
    manager.revert(manager.step)
    manager.advance()  # a step that has no tokens for the owner of the blocks
    assert manager.look_up(1, [1] * 9).num_blocks == 0, "a block is joined that nobody computes"


def check_spills() -> None:
    """What a step that failed was to copy to the host tier is not there."""
    manager = make_manager(4, num_host_blocks=4)
    run(manager, 0, [1] * 16)
    end(manager, 0)
    manager.advance()
    manager.allocate(manager.look_up(1, [2] * 16))
    manager.append(1, 0, 16)
    assert manager.look_up(2, [1] * 17).num_blocks == 4, "spilled content is not found"
    manager.revert(manager.step)
    assert manager.look_up(2, [1] * 17).num_blocks == 0, "content of a failed step is found"


def check_windows() -> None:
    """Blocks that nobody sees any more are given back."""
    manager = make_manager(12, (4,))
    run(manager, 0, list(range(24)), chunk=4)
    assert manager.num_used_blocks == 1, "blocks behind the window are held"


def check_samples() -> None:
    """A prompt's blocks are shared; of three that write into its last one, two get copies."""
    harness = Harness(num_blocks=20)
    group = harness.add([1] * 9, 3, n=3)
    harness.step()
    assert harness.blocks.num_used_blocks == 3, "samples do not share the prompt"
    assert len(harness.step().copies) == 2, "copies of the last block"
    assert harness.blocks.num_used_blocks == 2 + 3, "each sample has one block of its own"
    harness.run()
    harness.check_output(group)


def check_duplicates() -> None:
    """Two that compute the same side by side end up with the same full blocks."""
    harness = Harness(num_blocks=20, max_num_batched_tokens=32)
    for _ in range(2):
        harness.add([1] * 8, 12)
    for _ in range(9):
        harness.step()
    assert harness.blocks.num_used_blocks == 4, "duplicates are kept"
    harness.run()


def check_fairness() -> None:
    """Tenants take turns."""
    harness = Harness(num_blocks=20, policy="fair", max_num_seqs=1)
    groups = [harness.add([index], 2, tenant=tenant) for index, tenant in enumerate("aaab")]
    harness.run()
    started = sorted(groups, key=lambda group: group.metrics.first_scheduled_time)
    assert [group.tenant for group in started] == ["a", "b", "a", "a"], "a tenant is served out of turn"


def check_ends() -> None:
    """What can never fit ends with a reason, also if the step fails in which that was found."""
    harness = Harness(num_blocks=3)
    group = harness.add([1] * 13)
    harness.executor.fail_next = True
    with pytest.raises(RuntimeError, match="planted"):
        harness.step()
    assert harness.step().ignored == (group.request_id,), "the end of a request is not reported"


def check_preemption() -> None:
    """The oldest is never preempted, and nothing is counted twice."""
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    groups = [harness.add([i] * 6, 12) for i in range(3)]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > 0, "no request was preempted"
    assert groups[0].metrics.num_preemptions == 0, "the oldest was preempted"
    assert harness.blocks.stats.num_queried_tokens == 3 * 5, "lookups of preempted requests are counted"
    for group in groups:
        harness.check_output(group)


def check_workload(seed: int) -> None:
    """A random workload in a small cache: outputs, counters, integrity after every step, nothing left behind."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (None, None), (5,), (None, 6)])
    harness = Harness(
        num_blocks=rng.randint(10, 18) * len(windows),
        windows=windows,
        max_num_seqs=rng.randint(3, 6),
        max_num_batched_tokens=rng.randint(3, 24),
        caching=seed % 5 != 0,
        num_host_blocks=rng.choice([0, 6, 20]),
        preemption_mode=rng.choice([None, "swap", "recompute"]),
        failing_steps={rng.randint(2, 30) for _ in range(6)},
        policy=rng.choice(POLICIES),
    )
    for _ in range(10):
        prompt = [0] * rng.randint(0, 10) + [rng.randint(0, 1) for _ in range(rng.randint(1, 5))]
        harness.add(prompt, rng.randint(1, 9), rng.choice(KEYS), n=rng.choice([1, 1, 3]), tenant=rng.choice("ab"))
        if rng.random() < 0.6:
            if rng.random() < 0.4 and harness.requests.running:
                harness.scheduler.preemptor.preempt(rng.choice(harness.requests.running))
            harness.step()
    harness.run()
    for group in harness.groups:
        harness.check_output(group)
    stats = harness.blocks.stats
    assert stats.num_queried_tokens == stats.num_hit_tokens + sum(stats.num_missed_tokens.values()), "counters"


def check_everything() -> None:
    """The checks that are quick and say most come first."""
    for check in (
        check_eviction,
        check_progress,
        check_keys,
        check_pins,
        check_joins,
        check_spills,
        check_windows,
        check_samples,
        check_duplicates,
        check_fairness,
        check_ends,
        check_preemption,
    ):
        check()
    for seed in range(NUM_SEEDS):
        check_workload(seed)

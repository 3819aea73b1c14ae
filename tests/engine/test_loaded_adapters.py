"""Requests with LoRA adapters and few slots: who waits, who starts, what is unloaded, and that nothing is mixed up."""

import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.lora import KnownAdapter
from quire.common.outputs import AdapterStats
from quire.config.scheduler import POLICIES
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.scheduling import loaded_adapters, scheduler
from quire.engine.scheduling.loaded_adapters import MAX_COUNTED_NAMES, OTHER_NAMES, TURN_STEPS, LoadedAdapters
from quire.engine.scheduling.scheduler import LOOK_AHEAD
from quire.kv.prefix_cache.content_hash import ContentKey
from tests.effort import examples

from .fake import Harness


def adapter(name: str, num_bytes: int = 1, digest: str = "") -> KnownAdapter:
    digest = digest or name
    return KnownAdapter(name, ord(name[0]), f"/adapters/{name}", digest, num_bytes, name)


A, B, C, D, E = map(adapter, "abcde")


def add(harness: Harness, of: KnownAdapter | None, prompt: list[int] | None = None, **kwargs: object) -> SequenceGroup:
    key = ContentKey() if of is None else ContentKey(of.digest)
    return harness.add(prompt or [1, 2, 3], key=key, adapter=of, **kwargs)


def kept(*adapters: KnownAdapter) -> frozenset[str]:
    return frozenset(each.digest for each in adapters)


@pytest.fixture
def no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot can be claimed as soon as its adapter is loaded."""
    monkeypatch.setattr(loaded_adapters, "TURN_STEPS", 0)


@pytest.mark.essential
@settings(max_examples=examples(150), deadline=None)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from([None, A, B, C, D, E]),
            st.lists(st.integers(0, 1), min_size=1, max_size=10),
            st.integers(1, 6),
            st.sampled_from([1, 1, 2]),
        ),
        min_size=1,
        max_size=14,
    ),
    options=st.fixed_dictionaries(
        {
            "max_loras": st.integers(1, 3),
            "lora_bytes": st.sampled_from([None, 1, 2]),
            "policy": st.sampled_from(POLICIES),
            "num_blocks": st.integers(6, 14),
            "num_host_blocks": st.sampled_from([0, 8]),
            "preempt_turns": st.sampled_from([0, 5]),
            "failing_steps": st.sets(st.integers(1, 12), max_size=3),
            "depth": st.sampled_from([1, 2]),
        }
    ),
)
def test_any_schedule_gives_each_request_the_tokens_of_its_own_adapter(requests, options) -> None:
    if options["depth"] == 2:
        options |= {"failing_steps": set(), "preempt_turns": 0}
    harness = Harness(**options)
    harness.adapters.keep_only(kept(A, B, C))
    groups = [add(harness, of, prompt, max_tokens=n, n=k) for of, prompt, n, k in requests]
    harness.run()
    for group in groups:
        if group.error is None:
            harness.check_output(group)
        else:
            assert "never fit" in group.error or "KV cache" in group.error
    harness.release_ended()
    assert set(harness.executor.adapters.values()) <= kept(A, B, C)


def test_many_requests_of_five_adapters_share_two_slots() -> None:
    harness = Harness(num_blocks=40, max_loras=2)
    groups = [add(harness, of, [place % 3] * 5, max_tokens=5) for place in range(12) for of in (A, B, C, D, E)]
    harness.run()
    for group in groups:
        harness.check_output(group)
    assert len(harness.executor.loads) == 5, "an adapter is loaded for all requests that wait for it"


def test_the_least_recently_used_adapter_that_no_request_holds_is_unloaded() -> None:
    harness = Harness(num_blocks=20, max_loras=2)
    harness.adapters.keep_only(kept(A, B, C))
    for of in (A, B, A):
        add(harness, of, max_tokens=2)
        harness.run()
    assert harness.executor.loads == ["a", "b"]
    add(harness, C, max_tokens=2)
    harness.run()
    assert [each.name for each in harness.adapters.loaded] == ["a", "c"]


def test_a_pinned_adapter_makes_room_only_if_all_others_cannot() -> None:
    harness = Harness(num_blocks=20, max_loras=2, lora_bytes=3)
    harness.adapters.keep_only(kept(A, B, C, D), pinned=kept(A))
    for of in (A, B, C, D):
        add(harness, of, max_tokens=1)
        harness.run()
    assert [each.name for each in harness.adapters.loaded] == ["a", "d"]
    large = add(harness, adapter("x", num_bytes=3), max_tokens=1)
    harness.run()
    harness.check_output(large)
    assert harness.adapters.loaded == []


def test_a_request_without_a_slot_does_not_block_those_behind_it() -> None:
    harness = Harness(num_blocks=20, max_loras=1)
    running, waiting, base = add(harness, A, max_tokens=8), add(harness, B), add(harness, None)
    harness.step()
    assert running in harness.requests.running
    assert base in harness.requests.running
    assert waiting not in harness.requests.running
    harness.run()
    harness.check_output(waiting)


@pytest.mark.parametrize("policy", POLICIES)
def test_many_requests_without_slots_block_neither_those_behind_them_nor_each_other(policy: str) -> None:
    """More wait than a step looks at, of one adapter and of very many."""
    harness = Harness(num_blocks=40, max_loras=1, policy=policy)
    running = add(harness, A, max_tokens=8, tenant="a")
    waiting = [add(harness, B, max_tokens=1, tenant=str(i % 3)) for i in range(LOOK_AHEAD)]
    waiting += [add(harness, adapter(f"n{i}"), max_tokens=1) for i in range(LOOK_AHEAD)]
    base, same = add(harness, None, max_tokens=4), add(harness, A, [4, 5], max_tokens=4)
    harness.step()
    assert {running, base, same} == set(harness.requests.running)
    harness.run()
    for group in (running, base, same, *waiting):
        harness.check_output(group)


def test_a_step_starts_a_limited_number_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "LOOK_AHEAD", 2)
    harness = Harness(num_blocks=40, max_loras=1)
    groups = [add(harness, of) for of in (A, B, None, A, None)]
    harness.step()
    assert harness.requests.running == [groups[0], groups[2]]
    harness.step()
    assert harness.requests.running == [groups[place] for place in (0, 2, 3, 4)]


def test_a_request_without_a_slot_is_not_starved_by_a_stream_of_others() -> None:
    """Requests of two adapters keep arriving; after their turn, the waiting one starts when older ones have ended."""
    harness = Harness(num_blocks=60, max_loras=2)
    for of in (A, B):
        add(harness, of, max_tokens=4)
    waiting = add(harness, C, max_tokens=2)
    for _ in range(2 * TURN_STEPS):
        for of in (A, B):
            add(harness, of, max_tokens=4)
        harness.step()
        if waiting.is_finished:
            break
    assert waiting.is_finished
    harness.check_output(waiting)
    harness.run()


def test_a_slot_can_be_claimed_when_its_adapter_has_had_its_turn() -> None:
    """Until then, requests behind the waiting one start."""
    harness = Harness(num_blocks=60, max_loras=1)
    for of in (A, B):
        add(harness, of, max_tokens=2 * TURN_STEPS)
    started = []
    for _ in range(TURN_STEPS + 2):
        behind = add(harness, A, max_tokens=1)
        harness.step()
        started.append(behind.metrics.first_scheduled_time is not None)
    assert started == [True] * TURN_STEPS + [False] * 2
    harness.run()


def test_all_requests_of_an_adapter_that_wait_claim_one_slot(no_turns: None) -> None:
    harness = Harness(num_blocks=40, max_loras=2)
    for of in (A, B):
        add(harness, of, max_tokens=5)
    harness.step()
    waiting, behind = [add(harness, C, max_tokens=2) for _ in range(2)], add(harness, B, max_tokens=1)
    harness.step()
    assert behind.metrics.first_scheduled_time is not None
    assert [group.metrics.first_scheduled_time for group in waiting] == [None, None]
    harness.run()


def test_without_a_configuration_there_is_no_slot() -> None:
    group = add(Harness(max_loras=1), A)
    adapters = LoadedAdapters()
    adapters.use(group)
    adapters.begin_step()
    assert not adapters.admit(group)
    assert adapters.loaded == []
    adapters.check_integrity()


def test_while_a_request_claims_a_slot_its_adapter_still_serves_those_in_front_and_those_that_have_started(
    no_turns: None,
) -> None:
    harness = Harness(num_blocks=40, max_loras=1, max_num_seqs=2)
    first, second, claiming, behind = (add(harness, of, max_tokens=6) for of in (A, A, B, A))
    harness.step()
    assert harness.requests.running == [first, second]
    harness.scheduler.preemptor.preempt(second)
    harness.step()
    assert second in harness.requests.running, "a preempted request keeps its slot"
    harness.run()
    assert claiming.metrics.first_scheduled_time < behind.metrics.first_scheduled_time


def test_an_adapter_that_needs_the_bytes_of_several_claims_all_of_them(no_turns: None) -> None:
    harness = Harness(num_blocks=40, max_loras=4, lora_bytes=3)
    small = [add(harness, of, max_tokens=3 + place) for place, of in enumerate((A, B, C))]
    harness.step()
    large = add(harness, adapter("x", num_bytes=3), max_tokens=2)
    more = [add(harness, of, max_tokens=2) for of in (A, B, C)]
    harness.step()
    assert not any(group in harness.requests.running for group in (large, *more))
    harness.run()
    for group in (*small, large, *more):
        harness.check_output(group)
    assert harness.executor.loads.index("x") == 3


def test_two_that_wait_claim_a_slot_each(no_turns: None) -> None:
    harness = Harness(num_blocks=40, max_loras=2)
    for of in (A, B):
        add(harness, of, max_tokens=3)
    waiting = [add(harness, of, max_tokens=2) for of in (C, D, E, C)]
    behind = add(harness, A, max_tokens=1)
    harness.step()
    harness.step()
    assert not any(group in harness.requests.running for group in (*waiting, behind))
    harness.run()
    assert harness.executor.loads[:4] == ["a", "b", "c", "d"]


def test_equal_content_under_two_names_takes_one_slot_and_shares_blocks() -> None:
    harness = Harness(num_blocks=20, max_loras=1)
    first, second = (adapter(name, digest="same") for name in "pq")
    for of in (first, second):
        group = add(harness, of, [1] * 9, max_tokens=1)
        harness.run()
        harness.check_output(group)
    assert group.num_cached_tokens == 8
    assert set(harness.adapters.stats()) == {"p", "q"}


def test_an_adapter_that_cannot_be_loaded_ends_only_its_own_requests(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    harness = Harness(num_blocks=20, max_loras=2)
    harness.executor.lost.add("b")
    lost, others = add(harness, B), [add(harness, of) for of in (A, C, None)]
    harness.run()
    assert lost.seqs[0].status is SequenceStatus.FINISHED_IGNORED
    assert lost.error == "the adapter 'b' could not be loaded: its folder is gone"
    assert [record.getMessage() for record in caplog.records] == [
        "request 0: the adapter could not be loaded: /adapters/b is gone"
    ]
    for group in others:
        harness.check_output(group)
    harness.executor.lost.clear()
    found = add(harness, B)
    harness.run()
    harness.check_output(found)


def test_an_adapter_that_is_no_longer_kept_leaves_with_its_last_request() -> None:
    harness = Harness(num_blocks=20, max_loras=2)
    harness.adapters.keep_only(kept(A, B))
    first, last = add(harness, A, max_tokens=2), add(harness, A, max_tokens=5)
    harness.step()
    harness.adapters.keep_only(kept(B))
    while not first.is_finished:
        harness.step()
    assert [each.name for each in harness.adapters.loaded] == ["a"]
    harness.run()
    harness.check_output(last)
    assert harness.adapters.loaded == []
    add(harness, B, max_tokens=1)
    harness.run()
    assert [each.name for each in harness.adapters.loaded] == ["b"]
    harness.adapters.keep_only(frozenset())
    assert harness.executor.adapters == {}
    harness.adapters.check_integrity()


def test_a_waiting_request_that_is_aborted_leaves_nothing() -> None:
    harness = Harness(num_blocks=20, max_loras=1)
    add(harness, A, max_tokens=4)
    waiting = add(harness, B)
    harness.step()
    assert harness.adapters.stats() == {"a": AdapterStats(0, 1), "b": AdapterStats(1, 0)}
    second = add(harness, A, max_tokens=4)
    harness.step()
    assert harness.adapters.stats()["a"] == AdapterStats(0, 2)
    harness.requests.remove(waiting)
    waiting.seqs[0].finish(SequenceStatus.FINISHED_ABORTED)
    harness.release_ended()
    harness.run()
    assert harness.executor.loads == ["a"]
    assert harness.adapters.stats() == {"a": AdapterStats(0, 0, 6, 8), "b": AdapterStats(0, 0, 3, 0)}
    assert second.is_finished


def test_a_cleared_table_loads_again() -> None:
    harness = Harness(num_blocks=20, max_loras=1)
    harness.adapters.keep_only(kept(A))
    for _ in range(2):
        group = add(harness, A, max_tokens=1)
        harness.run()
        harness.check_output(group)
        harness.adapters.clear(harness.executor)
        harness.executor.adapters.clear()
    assert harness.executor.loads == ["a", "a"]


def test_only_so_many_names_are_counted() -> None:
    harness = Harness(num_blocks=20, max_loras=2)
    for number in range(MAX_COUNTED_NAMES + 3):
        add(harness, adapter(f"n{number}"), max_tokens=1)
    harness.run()
    stats = harness.adapters.stats()
    assert len(stats) == MAX_COUNTED_NAMES + 1
    assert stats[OTHER_NAMES] == AdapterStats(0, 0, 9, 3)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda table, content: setattr(content, "slot", 1), "in slot|is in 1"),
        (lambda table, content: setattr(table, "max_bytes", 0), "exceed max_bytes"),
        (lambda table, content: content.users.clear(), "has ended holds"),
        (lambda table, content: table._slots.__setitem__(0, None), "two adapters|without its adapter"),
    ],
)
def test_what_does_not_agree_is_found(spoil, reason) -> None:
    harness = Harness(num_blocks=20, max_loras=2)
    add(harness, A)
    harness.step()
    spoil(harness.adapters, harness.adapters._contents["a"])
    with pytest.raises(AssertionError, match=reason):
        harness.adapters.check_integrity()

"""Any schedule gives every request the tokens of its solo run; nothing is lost, nothing is left behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config.scheduler import POLICIES
from quire.engine.requests.sequence import SequenceStatus
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey
from tests.effort import examples

from .fake import Harness, expected_output

requests = st.lists(
    st.fixed_dictionaries(
        {"prompt": st.lists(st.integers(0, 2), min_size=1, max_size=12), "max_tokens": st.integers(1, 8)},
        optional={
            "n": st.integers(1, 3),
            "tenant": st.sampled_from("ab"),
            "priority": st.integers(-2, 2),
            "key": st.sampled_from([NO_KEY, ContentKey(cache_salt="salt"), ContentKey(lora_id="adapter")]),
        },
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.essential
@settings(max_examples=examples(300), deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(15, 30),
    windows=st.sampled_from([(None,), (None, None), (6,), (None, 6), (3, None, 9)]),
    max_num_seqs=st.integers(3, 6),
    max_num_batched_tokens=st.integers(1, 20),
    caching=st.booleans(),
    num_host_blocks=st.integers(0, 16),
    preemption_mode=st.sampled_from([None, "swap", "recompute"]),
    failing_steps=st.sets(st.integers(0, 40), max_size=4),
    policy=st.sampled_from(POLICIES),
    stagger=st.integers(0, 3),
    preempt_turns=st.integers(0, 12),
)
def test_every_schedule_gives_the_solo_tokens(requests, stagger, **settings):
    harness = Harness(**settings)
    groups = []
    for request in requests:
        groups.append(harness.add(**request))
        for _ in range(stagger):
            harness.step()
    harness.run()
    for group in groups:
        harness.check_output(group)


def test_preemption_happens_and_changes_nothing():
    harness = Harness(num_blocks=6, max_num_batched_tokens=32)
    prompts = [[i] * 6 for i in range(4)]
    groups = [harness.add(prompt, 12) for prompt in prompts]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > 0
    assert [harness.output(g) for g in groups] == [expected_output(p, 12) for p in prompts]


def test_a_swapped_out_request_comes_back_before_a_new_one_starts_and_is_not_computed_again():
    harness = Harness(num_blocks=6, num_host_blocks=6, max_num_batched_tokens=32, caching=False)
    groups = [harness.add([i] * 6, 12) for i in range(3)]
    while not harness.requests.swapped:
        harness.step()
    (swapped,) = harness.requests.swapped
    assert swapped.seqs[0].status is SequenceStatus.SWAPPED
    num_computed = swapped.seqs[0].num_computed_tokens
    assert num_computed > 0
    late = harness.add([9] * 4, 2)
    while harness.requests.swapped:
        assert late.seqs[0].status is SequenceStatus.WAITING
        batch = harness.step()
    assert [t.target_tier for t in batch.transfers] == [0]
    assert {s.seq_id: s.start for s in batch.sequences}[swapped.seqs[0].seq_id] == num_computed
    harness.run()
    assert [harness.output(g) for g in groups] == [expected_output([i] * 6, 12) for i in range(3)]


def test_a_full_host_tier_falls_back_to_recomputation():
    harness = Harness(num_blocks=6, num_host_blocks=1, max_num_batched_tokens=32)
    groups = [harness.add([i] * 6, 12) for i in range(4)]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > 0
    assert harness.scheduler.preemptor.num_preemptions_by_swap == 0
    assert [harness.output(g) for g in groups] == [expected_output([i] * 6, 12) for i in range(4)]


@pytest.mark.parametrize("source_tier", [0, 1])
def test_a_step_that_fails_while_swapping_loses_nothing(source_tier):
    harness = Harness(num_blocks=6, num_host_blocks=8, max_num_batched_tokens=32)
    groups = [harness.add([i] * 6, 12) for i in range(3)]
    original, failed = harness.executor.execute, []

    def execute(batch):
        if any(t.source_tier == source_tier for t in batch.transfers) and not failed:  # before any block is copied
            failed.append(batch)
            raise RuntimeError("planted failure")
        return original(batch)

    harness.executor.execute = execute
    harness.run()
    assert failed
    assert [harness.output(g) for g in groups] == [expected_output([i] * 6, 12) for i in range(3)]


def test_removing_a_swapped_out_request_returns_its_host_blocks():
    harness = Harness(num_blocks=6, num_host_blocks=6, max_num_batched_tokens=32)
    for i in range(3):
        harness.add([i] * 6, 12)
    while not harness.requests.swapped:
        harness.step()
    harness.requests.remove(next(iter(harness.requests.swapped)))
    harness.blocks.check_integrity()
    harness.run()


@pytest.mark.essential
def test_the_oldest_request_is_never_preempted():
    harness = Harness(num_blocks=6)
    groups = [harness.add([i] * 5, 14) for i in range(5)]
    harness.run()
    assert groups[0].metrics.num_preemptions == 0
    assert [g.metrics.finished_time for g in groups] == sorted(g.metrics.finished_time for g in groups)


@pytest.mark.essential
def test_a_long_prompt_is_computed_in_chunks_beside_running_decodes():
    harness = Harness(num_blocks=16, max_num_batched_tokens=5)
    harness.add([1, 2], 12)
    harness.step()
    harness.add([3] * 14, 2)
    lens = [[len(s.token_ids) for s in harness.step().sequences] for _ in range(4)]
    assert lens == [[1, 4], [1, 4], [1, 4], [1, 2]]


def test_only_a_sequence_with_nothing_left_to_compute_draws_a_token():
    harness = Harness(num_blocks=16, max_num_batched_tokens=5)
    harness.add([3] * 12, 1)
    draws = [harness.step().sequences[0].drawn is not None for _ in range(3)]
    assert draws == [False, False, True]


def test_eos_stops_and_ignore_eos_does_not():
    prompt = [1, 2, 3]
    tokens = expected_output(prompt, 8)
    harness = Harness(eos=frozenset({tokens[2]}))
    stopped, ignored = harness.add(prompt, 8), harness.add(prompt, 8, ignore_eos=True)
    harness.run()
    first = tokens.index(tokens[2])
    assert harness.output(stopped) == tokens[: first + 1]
    assert stopped.seqs[0].status is SequenceStatus.FINISHED_STOPPED
    assert stopped.seqs[0].output.stop_reason is None
    assert harness.output(ignored) == tokens
    assert ignored.seqs[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED


def test_a_stop_token_id_stops_and_is_named():
    prompt = [1, 2, 3]
    tokens = expected_output(prompt, 8)
    harness = Harness()
    group = harness.add(prompt, 8, stop_token_ids=[tokens[3]])
    harness.run()
    assert group.seqs[0].output.stop_reason == tokens[3]
    assert harness.output(group)[-1] == tokens[3]


def test_the_context_limit_caps_the_output():
    harness = Harness(num_blocks=3, block_size=4)
    group = harness.add([1] * 5, max_tokens=100)
    harness.run()
    assert group.seqs[0].num_tokens == 12
    assert group.seqs[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED


def test_a_prompt_that_never_fits_is_ignored_with_a_reason_and_the_others_run():
    harness = Harness(num_blocks=3, block_size=4)
    too_long, fine = harness.add([1] * 13), harness.add([1] * 3, 2)
    batch = harness.step()
    assert batch.ignored == (too_long.request_id,)
    assert too_long.seqs[0].status is SequenceStatus.FINISHED_IGNORED
    assert "13 tokens never fit" in too_long.error
    harness.run()
    assert len(harness.output(fine)) == 2


@pytest.mark.essential
def test_a_failed_step_loses_nothing():
    harness = Harness()
    groups = [harness.add([i] * 6, 6) for i in range(3)]
    for turn in range(4):
        harness.executor.fail_next = turn % 2 == 0
        if harness.executor.fail_next:
            with pytest.raises(RuntimeError, match="planted"):
                harness.step()
            harness.blocks.check_integrity()
        else:
            harness.step()
    harness.run()
    assert [harness.output(g) for g in groups] == [expected_output([i] * 6, 6) for i in range(3)]


def test_removing_a_running_and_a_waiting_request_returns_their_blocks():
    harness = Harness(max_num_seqs=1)
    running, waiting = harness.add([1] * 8), harness.add([2] * 8)
    harness.step()
    assert harness.blocks.num_used_blocks > 0
    for group in (running, waiting):
        harness.requests.remove(group)
        harness.blocks.check_integrity()
    assert harness.blocks.num_used_blocks == 0
    assert not harness.requests


def test_max_num_seqs_bounds_what_runs_at_once():
    harness = Harness(num_blocks=20, max_num_seqs=2)
    for i in range(5):
        harness.add([i], 4)
    assert len(harness.step().sequences) == 2
    harness.run()


def test_only_those_that_may_run_do_and_the_others_keep_what_they_have():
    harness = Harness(num_blocks=20)
    groups = [harness.add([i] * 5, 6) for i in range(4)]
    harness.step()
    harness.step()
    later = harness.add([9] * 3, 2)
    for only in ({groups[1], later}, {groups[3]}, set()):
        before = [len(Harness.output(group)) for group in harness.groups]
        batch = harness.scheduler.schedule(only)
        assert {harness.requests.owners[s.seq_id][0] for s in batch.sequences} == only
        harness.committer.commit(batch, harness.executor.execute(batch))
        after = [len(Harness.output(group)) for group in harness.groups]
        assert [b - a for a, b in zip(before, after, strict=True)] == [group in only for group in harness.groups]
        harness.requests.check_integrity()
    harness.run()
    for group in harness.groups:
        harness.check_output(group)

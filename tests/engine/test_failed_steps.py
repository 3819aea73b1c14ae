"""A step that fails loses nothing: neither a request that ended in its plan nor one that was aborted meanwhile."""

from collections.abc import Iterator
from copy import copy
from types import SimpleNamespace
from typing import NoReturn

import pytest
from msgspec.structs import replace

from quire.engine.requests.sequence import SequenceGroup, SequenceStatus

from .fake import Harness


def fail(harness: Harness) -> None:
    harness.executor.fail_next = True
    with pytest.raises(RuntimeError, match="planted"):
        harness.step()


@pytest.mark.essential
def test_what_ended_in_the_plan_of_failed_steps_is_reported_once_by_the_next():
    harness = Harness(num_blocks=3)
    first = harness.add([1] * 13)
    fail(harness)
    second, fine = harness.add([1] * 14), harness.add([1] * 3, 2)
    fail(harness)
    assert harness.step().ignored == (first.request_id, second.request_id)
    assert first.seqs[0].status is second.seqs[0].status is SequenceStatus.FINISHED_IGNORED
    assert harness.step().ignored == ()
    harness.check_output(fine)


@pytest.mark.parametrize("is_joined", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_request_aborted_while_the_step_runs_is_gone_whatever_becomes_of_the_step(is_joined, fails):
    harness = Harness(num_blocks=12, max_num_batched_tokens=32)
    groups = [harness.add([1] * 9, 3) for _ in range(2)]
    aborted = groups[is_joined]
    batch = harness.scheduler.schedule()
    assert len(batch.sequences) == 2
    harness.requests.remove(aborted)
    if fails:
        harness.requests.revert(batch.step)
    else:
        harness.committer.commit(batch, harness.executor.execute(batch))
    harness.blocks.check_integrity()
    harness.run()
    harness.check_output(groups[not is_joined])
    assert harness.requests.owners.get(aborted.seqs[0].seq_id) is None


def test_a_request_aborted_while_it_is_swapped_in_a_step_that_fails_is_gone():
    harness = Harness(num_blocks=12, num_host_blocks=12, preemption_mode="swap")
    group = harness.add([1] * 9, 3)
    harness.step()
    harness.scheduler.preemptor.preempt(group)
    batch = harness.scheduler.schedule()
    assert [t.source_tier for t in batch.transfers] == [0, 1], "it is brought back at once"
    harness.requests.remove(group)
    harness.requests.revert(batch.step)
    harness.blocks.check_integrity()
    assert harness.blocks.num_used_blocks == 0
    assert harness.blocks.tiers.pools[1].num_free_blocks == 12


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_goes_on_in_another_engine_than_the_one_that_died(n):
    """One sample behind what was told of it; several begin again. What was told or counted already is not again."""
    dead, heir = (Harness(num_blocks=12) for _ in range(2))
    group, successor = (harness.add([1] * 9, 8, n=n, prompt_logprobs=0) for harness in (dead, heir))
    for _ in range(4):
        dead.step()
    told = Harness.output(group) if n == 1 else []
    assert len(told) == (4 if n == 1 else 0)
    successor.resume(told, copy(group.metrics), 5)
    assert (successor.outputs.scores is None) == (n == 1), (
        "the prompt's log-probabilities were told with the first token"
    )
    heir.run()
    heir.check_output(successor)
    assert successor.num_cached_tokens == 5
    assert successor.metrics.first_token_time == group.metrics.first_token_time
    assert heir.committer.num_prompt_tokens == 0


def test_a_draw_that_fails_ends_its_request_alone():
    harness = Harness(num_blocks=12, max_num_batched_tokens=32)
    bad, fine = harness.add([1] * 9, 3), harness.add([2] * 5, 4)
    batch = harness.scheduler.schedule()
    result = harness.executor.execute(batch)
    harness.committer.commit(batch, replace(result, errors={0: "its own code failed"}))
    assert bad.has_failed
    output = bad.to_failed_output()
    assert (output.finished, output.error) == (True, "request '0': its own code failed")
    samples = [(sample.index, sample.token_ids, sample.text, sample.finish_reason) for sample in output.outputs]
    assert samples == [(0, [], "", "abort")]
    harness.run()
    harness.check_output(fine)
    assert not fine.has_failed


# Plans that fail


def planned_when_it_fails(harness: Harness) -> SequenceGroup | None:
    """Plan a step in which something raises; returns the request that was being planned."""
    with pytest.raises(RuntimeError, match="planted"):
        harness.scheduler.schedule()
    return harness.requests.planning_group


def failing(*_: object) -> NoReturn:
    raise RuntimeError("planted failure")


@pytest.mark.parametrize(
    ("owner", "method"), [("blocks", "advance"), ("policy", "candidates"), ("blocks", "take_transfers")]
)
def test_a_plan_that_fails_outside_the_work_of_a_request_names_none(monkeypatch, owner, method):
    harness = Harness(num_blocks=12)
    harness.requests.planning_group = harness.add([1] * 9, 3)  # the plan before has failed
    monkeypatch.setattr(harness.blocks if owner == "blocks" else harness.requests.policy, method, failing)
    assert planned_when_it_fails(harness) is None


def test_a_plan_that_fails_between_two_queued_requests_names_none(monkeypatch):
    harness = Harness(num_blocks=12)
    first = harness.add([1] * 9, 3)

    def candidates(now_s: float) -> Iterator[SequenceGroup]:
        yield first
        raise RuntimeError("planted failure")

    monkeypatch.setattr(harness.requests.policy, "candidates", candidates)
    assert planned_when_it_fails(harness) is None


@pytest.mark.parametrize(("policy", "method"), [("fcfs", "look_up"), ("prefix", "num_cached_tokens")])
def test_a_queued_request_that_cannot_be_looked_up_is_named(monkeypatch, policy, method):
    harness = Harness(num_blocks=12, policy=policy)
    group = harness.add([1] * 9, 3)
    monkeypatch.setattr(harness.blocks, method, failing)
    assert planned_when_it_fails(harness) is group


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("step", ["append", "drafts", "mask"])
def test_a_running_request_that_cannot_be_planned_is_named(monkeypatch, place, step):
    drafted: list[int] = []
    harness = Harness(num_blocks=12, draft=lambda group, seq: [1] * 8 if seq.seq_id in drafted else [])
    groups = [harness.add([token_id] * 4, 6) for token_id in (1, 2)]
    for _ in range(1 if step == "append" else 2):
        harness.step()
    seq = groups[place].seqs[0]
    if step == "mask":
        seq.grammar = SimpleNamespace(mask=failing)
    elif step == "drafts":
        drafted.append(seq.seq_id)
        monkeypatch.setattr(harness.blocks, "can_append", failing)
    else:
        append = harness.blocks.append
        monkeypatch.setattr(
            harness.blocks,
            "append",
            lambda seq_id, *counts: failing() if seq_id == seq.seq_id else append(seq_id, *counts),
        )
    assert planned_when_it_fails(harness) is groups[place]

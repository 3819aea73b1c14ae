"""What a step's result changes: tokens, ends, times, counters, drafts, and what a tenant is charged."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from quire.common.batch import Drafted
from quire.common.faults import Fault, inject
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.model_drafts import ModelDrafts
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus

from .beams import BeamHarness
from .fake import Harness, expected_output
from .test_logprobs import check as check_logprobs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two blocks and one token
WRONG = 50
"""a token that the fake model never says"""


def commit(harness: Harness, **changes: object) -> list[SequenceGroup]:
    """One step, with these fields of its result; returns what commit returns."""
    batch = harness.scheduler.schedule()
    changed = harness.committer.commit(batch, replace(harness.executor.execute(batch), **changes))
    harness.requests.check_integrity()
    return changed


def count_steps(harness: Harness) -> Harness:
    """Times are numbers of steps from here on."""
    harness.committer.clock = lambda: float(harness.scheduler.num_steps)
    return harness


# What is returned


def test_requests_that_got_a_token_are_returned_once_each_in_the_order_of_the_batch():
    harness = Harness(num_blocks=40)
    samples, single, long = harness.add([1] * 3, 4, n=2), harness.add([2] * 3, 4), harness.add([3] * 30, 2)
    assert commit(harness) == [samples, single], "the long prompt is computed in chunks"
    assert commit(harness) == [samples, single]
    assert commit(harness) == [samples, single, long]
    assert commit(harness) == [samples, single, long]
    assert not harness.requests
    for group in harness.groups:
        harness.check_output(group)


def test_a_request_aborted_while_the_step_runs_is_left_out_and_the_others_get_their_own_tokens():
    harness = Harness(num_blocks=40)
    aborted, *others = (harness.add([token] * 4, 3, n=1 + token % 2) for token in (1, 2, 3))
    batch = harness.scheduler.schedule()
    result = harness.executor.execute(batch)
    harness.requests.remove(aborted)
    assert harness.committer.commit(batch, result) == others
    harness.run()
    for group in others:
        harness.check_output(group)


def test_a_request_that_is_only_scored_is_returned_when_all_of_it_is_computed():
    harness = count_steps(Harness(num_blocks=20, max_num_batched_tokens=4))
    group = harness.add_scored(PROMPT[:6], [7, 8])
    assert [commit(harness), commit(harness)] == [[], [group]]
    assert (group.metrics.first_token_time, group.metrics.finished_time) == (2, 2)
    assert group.seqs[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert not harness.requests


# Failures


def test_a_request_whose_tokens_cannot_be_added_is_returned_and_ends_alone():
    harness = count_steps(Harness(num_blocks=40))
    before, bad, behind = (harness.add([token] * 4, 3, n=2) for token in (1, 2, 3))
    commit(harness)
    with inject(Fault("commit.sequence", subject=bad.seqs[1].seq_id)):
        assert commit(harness) == [before, bad, behind]
    assert bad.error == "request '1' failed when its tokens were added: RuntimeError"
    assert bad.has_failed
    assert [seq.status for seq in bad.seqs] == [SequenceStatus.FINISHED_ABORTED] * 2
    assert bad.metrics.finished_time == 2
    harness.run()
    for group in (before, behind):
        harness.check_output(group)


def test_a_request_one_of_whose_draws_failed_ends_alone_with_the_reason():
    harness = count_steps(Harness(num_blocks=40))
    before, bad, behind = harness.add([1] * 4, 3), harness.add([2] * 4, 3, n=3), harness.add([3] * 4, 3)
    assert commit(harness, errors={2: "its own code failed"}) == [before, bad, behind]
    assert bad.error == "request '1': its own code failed"
    assert [seq.status for seq in bad.seqs] == [SequenceStatus.FINISHED_ABORTED] * 3
    assert bad.metrics.finished_time == 1
    harness.run()
    for group in (before, behind):
        harness.check_output(group)


# Times and counters


def test_the_times_of_a_request_are_those_of_its_first_token_and_its_end():
    harness = count_steps(Harness(num_blocks=40, max_num_batched_tokens=10))
    first, second = harness.add([1] * 6, 3), harness.add([2] * 8, 2)
    harness.run()
    assert (first.metrics.first_token_time, first.metrics.finished_time) == (1, 3)
    assert (second.metrics.first_token_time, second.metrics.finished_time) == (2, 3)


def test_samples_have_finished_with_the_last_of_them():
    outputs = [expected_output(PROMPT, 8, (None,), sample) for sample in range(2)]
    stop = next(token for token in outputs[1][:-1] if token not in outputs[0])
    harness = count_steps(Harness(num_blocks=20))
    group = harness.add(PROMPT, 8, n=2, stop_token_ids=[stop])
    while not group.seqs[-1].status.is_finished:
        assert commit(harness) == [group]
    assert group.metrics.finished_time is None
    harness.run()
    assert group.metrics.finished_time == 8


def test_beams_have_finished_when_the_search_ends():
    harness = count_steps(BeamHarness(num_blocks=40))
    group = harness.add_beams(PROMPT, 2, 4)
    for _ in range(3):
        assert commit(harness) == [group]
        assert group.metrics.finished_time is None
    assert commit(harness) == [group]
    assert (group.metrics.first_token_time, group.metrics.finished_time) == (1, 4)
    assert harness.committer.num_generated_tokens == 1 + 3 * 2


def test_each_prompt_is_counted_once_and_each_generated_token():
    harness = Harness(num_blocks=60)
    assert (harness.committer.num_prompt_tokens, harness.committer.num_generated_tokens) == (0, 0)
    harness.add(PROMPT, 3)
    harness.add([1] * 5, 4, n=3)
    harness.add_scored([2] * 4, [7, 8])
    harness.run()
    assert harness.committer.num_prompt_tokens == 9 + 5 + 5
    assert harness.committer.num_generated_tokens == 3 + 3 * 4
    assert harness.committer.num_tokens == 19 + 15


# What a tenant is charged


def record_charges(harness: Harness) -> list[tuple[SequenceGroup, int]]:
    charges: list[tuple[SequenceGroup, int]] = []
    charge = harness.requests.policy.charge

    def record(group: SequenceGroup, num_tokens: int) -> None:
        charges.append((group, num_tokens))
        charge(group, num_tokens)

    harness.requests.policy.charge = record
    return charges


def test_tokens_from_the_cache_are_free():
    harness = Harness(num_blocks=20, policy="fair")
    charges = record_charges(harness)
    first = harness.add(PROMPT, 2)
    harness.run()
    second = harness.add(PROMPT, 2)
    harness.run()
    assert second.num_cached_tokens == 8
    assert charges == [(first, 9), (first, 1), (second, 1), (second, 1)]


def test_tokens_that_are_computed_again_are_free():
    harness = Harness(
        num_blocks=20, policy="fair", caching=False, max_num_batched_tokens=4, preemption_mode="recompute"
    )
    charges = record_charges(harness)
    group = harness.add(PROMPT, 3)
    for _ in range(3):
        harness.step()
    harness.scheduler.preemptor.preempt(group)
    harness.run()
    assert [num_tokens for _, num_tokens in charges] == [4, 4, 1, 0, 0, 1, 1]


def test_wrong_drafts_are_free_and_right_ones_are_tokens_as_others():
    """The engine chose to try them, not the tenant."""
    expected = expected_output(PROMPT, 6)

    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        return [*expected[seq.num_output_tokens :][:2], WRONG, WRONG]

    harness = Harness(num_blocks=40, policy="fair", draft=draft)
    charges = record_charges(harness)
    group = harness.add(PROMPT, 6)
    harness.run()
    assert group.metrics.num_drafts == (6, 4)
    assert [num_tokens for _, num_tokens in charges] == [11, 3]


# The cache


def test_what_is_computed_can_be_found_at_once():
    harness = Harness(num_blocks=20)
    harness.add(PROMPT, 8)
    harness.step()
    second = harness.add([*PROMPT, 7], 1)
    harness.step()
    assert second.num_cached_tokens == 9, "two blocks, and a copy of the token in the third"
    harness.run()
    for group in harness.groups:
        harness.check_output(group)


# Log-probabilities


def test_each_token_has_its_log_probabilities():
    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        prompt, sample = group.outputs.prompt_token_ids, seq.output.index
        return expected_output(prompt, 6, sample=sample)[seq.num_output_tokens :][:2]

    harness = Harness(num_blocks=40, max_num_batched_tokens=40, max_num_seqs=40, draft=draft)
    groups = [harness.add([token] * 5, 6, n=token, logprobs=1) for token in (1, 2)]
    harness.run()
    assert harness.scheduler.num_steps == 3, "drafts are accepted"
    for group in groups:
        assert group.error is None
        harness.check_output(group)
        check_logprobs(group)
        assert [len(sample.logprobs) for sample in group.to_output().outputs] == [6] * group.params.n


# Drafts


@pytest.mark.parametrize(("num_drafts", "num_steps"), [(1, 5), (2, 3), (9, 1)])
def test_right_drafts_are_accepted(num_drafts, num_steps):
    """Nine tokens are drawn in steps of one more than are drafted, the first of them with the prompt."""

    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        return expected_output(group.outputs.prompt_token_ids, 9)[seq.num_output_tokens :][:num_drafts]

    harness = Harness(num_blocks=40, max_num_batched_tokens=60, max_num_seqs=60, draft=draft)
    groups = [harness.add([token] * 5, 9) for token in (1, 2)]
    harness.run()
    assert harness.scheduler.num_steps == num_steps
    for group in groups:
        harness.check_output(group)


@pytest.mark.parametrize("num_right", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [1, 3])
def test_drafts_are_dropped_from_the_first_wrong_one_on(num_right, num_drafts):
    """Those behind it are right again, and not accepted: they follow a token that is not there."""

    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        tokens = expected_output(group.outputs.prompt_token_ids, 9)[seq.num_output_tokens :]
        return [WRONG if place == num_right else token for place, token in enumerate(tokens)][:num_drafts]

    harness = Harness(num_blocks=40, max_num_batched_tokens=60, max_num_seqs=60, draft=draft)
    groups = [harness.add([token] * 5, 9) for token in (1, 2)]
    while harness.requests:
        harness.step()
        assert all(seq.num_uncomputed_tokens == 1 for group in groups for seq in group.unfinished_seqs)
    for group in groups:
        harness.check_output(group)


@pytest.mark.parametrize(
    ("max_tokens", "num_drafts"),
    [(5, [4, 3, 2, 1, 0]), (None, list(range(14, -1, -1))), (100, list(range(14, -1, -1)))],
)
def test_no_more_is_drafted_than_the_request_may_have_behind_the_next_token(max_tokens, num_drafts):
    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        assert not seq.status.is_finished
        return [WRONG] * 50

    harness = Harness(num_blocks=6, max_num_batched_tokens=40, max_num_seqs=40, draft=draft)  # 24 tokens
    group = harness.add(PROMPT, max_tokens)
    harness.run()
    lengths = [s.num_drafts for batch in harness.executor.batches for s in batch.sequences if s.drawn]
    assert lengths == num_drafts
    assert group.error is None


def test_a_stop_among_accepted_drafts_ends_the_request_there():
    expected = expected_output(PROMPT, 12)
    stop = next(token for token in expected[2:] if expected.index(token) >= 2)
    output = expected[: expected.index(stop) + 1]
    harness = count_steps(
        Harness(num_blocks=20, eos=frozenset([stop]), draft=lambda group, seq: expected[seq.num_output_tokens :])
    )
    group = harness.add(PROMPT, 12)
    assert commit(harness) == [group]
    assert (harness.output(group), group.error) == (output, None)
    assert group.seqs[0].status is SequenceStatus.FINISHED_STOPPED
    assert group.seqs[0].num_uncomputed_tokens == 0
    assert group.metrics.finished_time == 1
    assert harness.blocks.num_used_blocks == 0
    second = harness.add([*PROMPT, *output, WRONG], 1)
    harness.run()
    assert second.num_cached_tokens == len(PROMPT) + len(output)


def test_what_was_drafted_is_counted_and_the_drafter_learns_of_each_end():
    expected, ended = expected_output(PROMPT, 9), []

    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        tokens = expected[seq.num_output_tokens :][:3]
        return tokens if seq.num_output_tokens < 4 else [WRONG]

    harness = Harness(num_blocks=40, max_num_batched_tokens=40, max_num_seqs=40, draft=draft)
    (drafter,) = harness.committer.drafting._drafters
    drafter.finish = lambda *arguments: ended.append(arguments)
    group = harness.add(PROMPT, 9, tenant="t")
    harness.run()
    harness.check_output(group)
    assert group.seqs[0].output.accepted_drafts == [0, 1, 2]
    stats = harness.committer.drafting.stats["function"]
    assert (stats.num_tokens, stats.num_accepted) == (3 + 4, 3)
    assert group.metrics.drafts == {"function": (7, 3)}
    assert harness.committer.drafting.tenant_stats == {"t": stats}
    assert ended == [(group, group.seqs[0])]


def test_drafts_are_accepted_where_nothing_learns_of_them():
    harness = Harness(num_blocks=20, draft=lambda group, seq: expected_output([1] * 6, 12)[seq.num_output_tokens :])
    harness.committer.drafting = None
    group = harness.add([1] * 6, 12)
    harness.run()
    harness.check_output(group)
    assert harness.scheduler.num_steps < 12
    assert harness.scheduler.drafting.stats["function"].num_drafts == 0


def test_what_a_draft_model_has_drafted_is_kept_for_its_sequence():
    harness, drafted = Harness(num_blocks=20), Drafted((7, 8), (0.5, 0.5))
    config = SpeculativeConfig(method="draft_model", model="m")
    harness.committer.drafting = Drafting([ModelDrafts(config)], config, 80)
    other, group = harness.add(PROMPT, 3), harness.add(PROMPT[:6], 3)
    commit(harness, drafted={1: drafted})
    reading = group.seqs[0].drafting.reading
    assert (reading.num_read, reading.num_tokens, reading.drafted) == (6, 7, drafted)
    assert other.seqs[0].drafting is None
    harness.committer.drafting = None
    commit(harness, drafted={1: Drafted((9,), (0.5,))})
    assert reading.drafted == drafted, "there is no draft model any more"

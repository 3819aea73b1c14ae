"""How a step gets drafts: from which sequences, in which rows and slots, and what a draft model does beside them."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from quire.common.batch import Ahead, Batch
from quire.common.faults import Fault, inject
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.model_drafts import ModelDrafts

from .beams import BeamHarness
from .fake import FunctionDrafter, Harness

WRONG = 50
"""A token that the fake model never says."""


def drafting_harness(num_drafts: int = 3, **arguments: object) -> Harness:
    """Each sequence gets this number of wrong drafts, where it may have them."""
    settings = {"num_blocks": 60, "block_size": 1, "max_num_batched_tokens": 40, "watermark": 0.0} | arguments
    return Harness(draft=lambda group, seq: [WRONG] * num_drafts, **settings)


def num_drafts(batch: Batch) -> list[int]:
    return [scheduled.num_drafts for scheduled in batch.sequences]


def record_proposals(harness: Harness) -> list[tuple]:
    """The arguments of each call that asks for drafts."""
    calls: list[tuple] = []
    drafting = harness.scheduler.drafting
    propose = drafting.propose

    def record(*arguments):
        calls.append(arguments)
        return propose(*arguments)

    drafting.propose = record
    return calls


# Which sequences


def test_drafts_are_asked_for_where_a_single_token_is_drawn():
    """Not before the samples of a prompt part, and not where a caller's own function chooses."""
    harness = drafting_harness(max_num_seqs=30)
    decoded = harness.add([1] * 3, 9)
    harness.step()
    calls = record_proposals(harness)
    samples, own = harness.add([2] * 3, 9, n=2), harness.add([3] * 3, 9)
    harness.add_scored([4] * 3, [5])
    own.processors = (object(),)
    harness.step()
    assert calls == [([(decoded, decoded.seqs[0])], 1 + 3 * 3, 25, harness.scheduler.step_time.predict)]
    harness.step()
    assert [seq for _, seq in calls[1][0]] == [*decoded.seqs, *samples.seqs]


def test_beams_get_no_drafts():
    harness = BeamHarness(num_blocks=40, draft=lambda group, seq: [WRONG])
    calls = record_proposals(harness)
    harness.add_beams([1, 2, 3], 2, 4)
    harness.run()
    assert calls == []


def test_nothing_is_searched_where_that_is_not_worth_its_time_or_there_is_no_row_left():
    harness = drafting_harness(max_num_seqs=1)
    calls = record_proposals(harness)
    harness.add([1] * 3, 9)
    harness.step()
    assert calls == []
    harness = drafting_harness(max_num_seqs=4)
    calls = record_proposals(harness)
    harness.scheduler.drafting._search_time = type("Spent", (), {"is_left": False})
    harness.add([1] * 3, 9)
    harness.step()
    assert calls == []


# Rows and slots


@pytest.mark.parametrize(("max_num_seqs", "max_draft_rows", "expected"), [(2, 1, 1), (2, 5, 5), (4, 3, 5), (9, 9, 6)])
def test_drafts_have_the_rows_that_sequences_leave_and_those_of_their_own(max_num_seqs, max_draft_rows, expected):
    harness = drafting_harness(max_num_seqs=max_num_seqs, max_draft_rows=max_draft_rows)
    for token in (1, 2):
        harness.add([token] * 3, 9)
    harness.step()
    assert sum(num_drafts(harness.step())) == expected


def test_drafts_have_the_tokens_that_a_step_leaves():
    harness = drafting_harness(max_num_batched_tokens=6)
    for token in (1, 2):
        harness.add([token] * 3, 9)
    assert num_drafts(harness.step()) == [0, 0]
    assert sum(num_drafts(harness.step())) == 4


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "expected"),
    [(10, 0.0, [0, 0]), (11, 0.0, [2, 0]), (12, 0.0, [2, 0]), (13, 0.0, [2, 2]), (13, 0.1, [2, 0]), (14, 0.1, [2, 2])],
)
def test_drafts_leave_a_block_for_each_other_sequence_and_the_reserve(num_blocks, watermark, expected):
    """Eight of the blocks have the tokens of two sequences."""
    harness = drafting_harness(2, num_blocks=num_blocks, watermark=watermark)
    for token in (1, 2):
        harness.add([token] * 3, 9)
    harness.scheduler.drafting, drafting = None, harness.scheduler.drafting
    harness.step()
    harness.scheduler.drafting = drafting
    assert num_drafts(harness.step()) == expected


def test_drafts_within_the_last_block_of_a_sequence_need_no_other():
    harness = drafting_harness(2, num_blocks=2, block_size=4)
    harness.add([1] * 5, 3)
    assert num_drafts(harness.step()) == [2]


def test_a_request_does_not_wait_for_the_blocks_of_drafts_that_were_wrong():
    harness = drafting_harness(9, num_blocks=16)
    harness.add([1] * 3, 9)
    harness.step()
    assert num_drafts(harness.step()) == [7]
    later = harness.add([2] * 10, 3)
    harness.step()
    assert harness.requests.running == harness.groups
    harness.run()
    harness.check_output(later)


def steps_of(seed: int, windows: list[int | None], draft: Callable[..., list[int]] | None) -> list[object]:
    """What each step computes without its drafts, in a cache that is too small for all requests."""
    rng = random.Random(seed)
    limits = {"num_blocks": 14 * len(windows), "block_size": 2, "max_num_batched_tokens": 12}
    harness = Harness(windows=windows, draft=draft, caching=False, watermark=0.0, **limits)
    steps: list[object] = []
    while len(harness.groups) < 12 or harness.requests:
        if len(harness.groups) < 12 and rng.random() < 0.5:
            harness.add([rng.randrange(50) for _ in range(rng.randint(1, 9))], rng.randint(1, 9), n=rng.choice([1, 2]))
        steps.append([(s.seq_id, s.start, s.end - s.num_drafts) for s in harness.step().sequences])
    assert harness.scheduler.preemptor.num_preemptions
    assert harness.blocks.num_used_blocks == 0
    for group in harness.groups:
        harness.check_output(group)
    return steps


@pytest.mark.parametrize("windows", [[None], [None, 4]])
@pytest.mark.parametrize("seed", range(6))
def test_wrong_drafts_change_no_step(seed, windows):
    """Nothing waits for them, and no request is preempted for them: neither in their step nor in later ones."""
    expected = steps_of(seed, windows, None)
    assert steps_of(seed, windows, lambda group, seq: [WRONG] * 5) == expected


def test_slots_for_drafts_that_cannot_be_made_are_the_fault_of_their_request():
    harness = drafting_harness()
    harness.add([1] * 3, 9)
    harness.step()
    bad = harness.add([2] * 3, 9)
    with inject(Fault("blocks.append", subject=bad.seqs[0].seq_id, after=1)), pytest.raises(RuntimeError):
        harness.scheduler.schedule()
    assert harness.requests.planning_group is bad


# A draft model


def model_harness(*drafters: FunctionDrafter, **arguments: object) -> Harness:
    """A draft model that drafts three tokens, and beside it these drafters."""
    settings = {"num_blocks": 60, "block_size": 1, "max_num_batched_tokens": 16, "watermark": 0.0} | arguments
    harness = Harness(**settings)
    config = SpeculativeConfig(method="draft_model", model="m", num_speculative_tokens=3, is_adaptive=False)
    drafting = Drafting([*drafters, ModelDrafts(config)], config, 60)
    harness.scheduler.drafting = harness.committer.drafting = drafting
    return harness


def ahead_of(batch: Batch) -> list[tuple[int, tuple[int, ...], int | None] | None]:
    """By sequence, how many tokens are drafted, what has not been read, and the next token of the prompt."""
    found = [scheduled.ahead for scheduled in batch.sequences]
    return [None if ahead is None else (ahead.num_drafts, ahead.unread, ahead.following) for ahead in found]


def test_a_draft_model_drafts_behind_the_end_of_each_sequence_in_slots_of_its_own():
    harness = model_harness()
    harness.add([1] * 3, 9)
    harness.add([2] * 20, 9)
    batch = harness.step()
    assert ahead_of(batch) == [(3, (), None), (0, (), 2)]
    assert [len(scheduled.block_tables[0]) for scheduled in batch.sequences] == [3 + 3, 13]
    assert harness.blocks.num_used_blocks == 3 + 13, "their slots are free again"
    assert ahead_of(harness.step()) == [(3, (1, 1, 1), None), (3, (2,) * 13, None)]
    harness.run()
    for group in harness.groups:
        harness.check_output(group)


@pytest.mark.parametrize("place", [0, 1])
def test_slots_for_its_drafts_that_cannot_be_made_are_the_fault_of_their_request(place):
    harness = model_harness()
    groups = [harness.add([token] * 3, 9) for token in (1, 2)]
    harness.step()
    subject = groups[place].seqs[0].seq_id
    with inject(Fault("blocks.append", subject=subject)), pytest.raises(RuntimeError):
        harness.scheduler.schedule()
    assert harness.requests.planning_group is groups[place]


def test_it_drafts_behind_the_drafts_of_the_step():
    harness = model_harness(FunctionDrafter(lambda group, seq: [WRONG] * 3))
    harness.add([1] * 6, 7)
    (scheduled,) = harness.step().sequences
    assert (scheduled.num_drafts, scheduled.ahead.num_drafts, scheduled.ahead.num_more) == (3, 2, 1)
    assert len(scheduled.block_tables[0]) == 6 + 3 + 2


@pytest.mark.parametrize(("num_blocks", "expected"), [(11, [0, 0]), (12, [3, 0]), (14, [3, 0]), (15, [3, 3])])
def test_where_there_are_no_slots_it_reads_and_drafts_nothing(num_blocks, expected):
    harness = model_harness(num_blocks=num_blocks)
    for token in (1, 2):
        harness.add([token] * 3, 9)
    harness.scheduler.drafting, drafting = None, harness.scheduler.drafting
    harness.step()
    harness.scheduler.drafting = drafting
    for group in harness.groups:
        drafting._known(group.seqs[0]).reading.num_read = 1
    batch = harness.step()
    assert ahead_of(batch) == [(expected[0], (1, 1), None), (expected[1], (2, 2), None)]
    assert [s.ahead for s in batch.sequences if not s.ahead.num_drafts] == [
        Ahead(unread=s.ahead.unread) for s in batch.sequences if not s.ahead.num_drafts
    ]
    assert [len(s.block_tables[0]) for s in batch.sequences] == [4 + count for count in expected]


def test_without_a_draft_model_no_sequence_has_one_ahead():
    harness = drafting_harness()
    harness.add([1] * 3, 9)
    assert ahead_of(harness.step()) == [None]


# Times


def test_the_time_of_a_step_is_learned_and_what_of_it_was_the_draft_models():
    harness, seen = drafting_harness(), []
    harness.add([1] * 3, 9)
    batch = harness.step()
    harness.scheduler.drafting.observe_step = lambda *arguments: seen.append(arguments)
    harness.scheduler.observe(batch, 5.0, 2.0, 3)
    assert harness.scheduler.step_time.predict(batch.num_tokens) == pytest.approx(5.0)
    harness.scheduler.observe(batch, 4.0)
    assert seen == [(batch, 3.0, 2.0, 3), (batch, 4.0, 0.0, 0)]


def test_the_time_of_a_step_is_learned_without_drafts_too():
    harness = Harness()
    harness.add([1] * 3, 9)
    harness.scheduler.observe(harness.step(), 5.0)
    assert harness.scheduler.step_time.predict(3) == pytest.approx(5.0)

"""Beam search in the engine finds what the definition finds, whatever happens to its beams' blocks on the way."""

import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import BeamSearchParams, InvalidParamsError, StructuredOutputsParams
from quire.engine.requests.sequence import SequenceStatus
from quire.interfaces.simulate.beams import BeamChurn, ChurningBeams
from tests.effort import examples

from .beams import BeamHarness

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]  # two blocks and one token
EOS = frozenset({7, 11, 23})
STRUCTURED = StructuredOutputsParams(regex="a+")
NEVER_ENDS = {"length_penalty": 1.0, "early_stopping": "never"}


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
def test_finds_what_the_definition_finds(length_penalty, early_stopping):
    reasons, lengths = set(), set()
    harness = BeamHarness(num_blocks=400, max_num_batched_tokens=400, max_num_seqs=400, eos=EOS)
    for width in (1, 2, 3, 5):
        for first in range(12):
            params = {"length_penalty": length_penalty, "early_stopping": early_stopping}
            harness.add_beams([first, *PROMPT[: first % 5]], width, 10, **params, stop_token_ids=[41])
    harness.run()
    for group in harness.groups:
        expected = harness.check_beams(group)
        assert len(expected) == group.params.n
        reasons |= {reason for _, _, reason in expected}
        lengths |= {len(tokens) for tokens, _, _ in expected}
    assert reasons == {"stop", "length"} or length_penalty in (-1, 2.5) or early_stopping is True
    assert len(lengths) > 1 or length_penalty > 1


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
@pytest.mark.parametrize("eos", [frozenset(), EOS])
def test_of_equals_the_earlier_beam_and_the_smaller_token_come_first(eos, length_penalty):
    harness = BeamHarness(grain=2.0, num_blocks=300, max_num_batched_tokens=300, max_num_seqs=300, eos=eos)
    for width in (2, 4):
        for first in range(20):
            harness.add_beams([first], width, 6, include_stop_str_in_output=True, length_penalty=length_penalty)
    harness.run()
    ties = 0
    for group in harness.groups:
        expected = harness.check_beams(group)
        ties += len(expected) - len({cum_logprob for _, cum_logprob, _ in expected})
    assert ties > 20


def test_ends_by_eos_are_ignored_if_asked_for():
    harness = BeamHarness(num_blocks=100, eos=frozenset(range(0, 50, 2)))
    group = harness.add_beams(PROMPT, 2, 6, ignore_eos=True, n=1)
    harness.run()
    harness.check_beams(group)
    (output,) = group.search.outputs(group.seqs)
    assert (len(output.token_ids), output.finish_reason) == (6, "length")
    assert any(token_id % 2 == 0 for token_id in output.token_ids)


def test_no_token_is_computed_twice_and_no_block_copied_without_need():
    harness = BeamHarness(num_blocks=60)
    group = harness.add_beams(PROMPT, 4, 12)
    harness.step()
    assert len(group.seqs) == 4
    assert harness.blocks.num_used_blocks == 3, "all beams share the prompt's blocks"
    while harness.requests:
        tails = [harness.blocks.block_tables(seq.seq_id)[0].tolist() for seq in group.seqs]
        last = group.seqs[0].num_computed_tokens // 4
        held = [table[last] for table in tails if last < len(table)]
        batch = harness.step()
        assert len(batch.copies) == len(held) - len(set(held)), "one for each that shares a half-full block, but one"
    harness.check_beams(group)
    assert sum(batch.num_tokens for batch in harness.executor.batches) == 9 + 4 * 11
    assert harness.blocks.num_used_blocks == 0


def test_beams_without_children_give_their_blocks_back_at_once():
    harness = BeamHarness(num_blocks=60)
    group = harness.add_beams(PROMPT, 4, 12)
    num_replaced = 0
    while harness.requests:
        before = list(group.seqs)
        harness.step()
        for seq in before:
            if seq not in group.seqs:
                num_replaced += 1
                assert harness.requests.owners.get(seq.seq_id) is None
                assert seq.seq_id not in harness.blocks
        if not group.is_finished:
            held = {int(b) for seq in group.seqs for b in harness.blocks.block_tables(seq.seq_id)[0]}
            assert harness.blocks.num_used_blocks == len(held)
    assert num_replaced > 5


@pytest.mark.parametrize("budget", [1, 2, 3, 5])
def test_beams_keep_in_step_where_only_some_run_in_a_step(budget):
    harness = BeamHarness(num_blocks=60, max_num_batched_tokens=budget)
    groups = [harness.add_beams([*PROMPT, i], width, 7) for i, width in enumerate((4, 3))]
    while harness.requests:
        harness.step()
        for group in groups:
            assert len({seq.num_tokens for seq in group.seqs}) == 1
    for group in groups:
        harness.check_beams(group)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_blocks", [6, 7, 9])
def test_more_beams_than_the_cache_holds_take_turns(num_blocks, caching):
    harness = BeamHarness(num_blocks=num_blocks, caching=caching, max_num_batched_tokens=32)
    groups = [harness.add_beams([*PROMPT, i], width, 11) for i, width in enumerate((5, 3))]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > 0
    for group in groups:
        harness.check_beams(group)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_preemption_before_every_step_changes_nothing(mode, caching, windows):
    harness = BeamHarness(
        num_blocks=60,
        windows=windows,
        num_host_blocks=120,
        preemption_mode=mode,
        max_num_batched_tokens=64,
        caching=caching,
        preempt_turns=60,
        failing_steps={3, 7, 8, 20},
        eos=EOS,
    )
    groups = [harness.add_beams([*PROMPT, i], width, 9, **NEVER_ENDS) for i, width in enumerate((3, 1, 4))]
    harness.run()
    assert harness.scheduler.preemptor.num_preemptions > harness.scheduler.num_steps // 2
    assert (harness.scheduler.preemptor.num_preemptions_by_swap > 5) == (mode == "swap")
    for group in groups:
        harness.check_beams(group)


@pytest.mark.essential
@settings(max_examples=examples(120), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_no_schedule_changes_what_is_found(seed):
    """Tiny caches, little room for tokens, failed steps, preemptions, and other requests beside."""
    rng = random.Random(seed)
    windows = rng.choice([(None,), (None,), (None, None), (None, 6)])
    harness = BeamHarness(
        grain=rng.choice([0.0, 1.0]),
        num_blocks=rng.randint(9, 16) * len(windows),
        windows=windows,
        max_num_seqs=rng.randint(5, 8),
        max_num_batched_tokens=rng.choice([2, 5, 9, 40]),
        caching=rng.random() < 0.7,
        num_host_blocks=rng.choice([0, 6, 40]),
        preemption_mode=rng.choice([None, "swap", "recompute"]),
        failing_steps={rng.randint(2, 40) for _ in range(rng.choice([0, 8]))},
        preempt_turns=rng.choice([0, 0, 25]),
        policy=rng.choice(["fcfs", "priority", "fair", "prefix"]),
        eos=rng.choice([frozenset(), EOS]),
    )
    samples, beams = [], []
    for _ in range(6):
        prompt = [0] * rng.randint(0, 10) + [rng.randint(0, 1) for _ in range(rng.randint(1, 5))]
        if rng.random() < 0.6:
            how = {"length_penalty": rng.choice([-1, 0, 1]), "early_stopping": rng.choice([True, False, "never"])}
            beams.append(harness.add_beams(prompt, rng.randint(1, 5), rng.randint(1, 12), **how))
        else:
            samples.append(harness.add(prompt, rng.randint(1, 9), n=rng.choice([1, 3]), ignore_eos=True))
        if rng.random() < 0.5:
            try:
                harness.executor.fail_next = harness.scheduler.num_steps in harness.failing_steps
                harness.step()
            except RuntimeError:
                harness.blocks.check_integrity()
    harness.run()
    for group in beams:
        harness.check_beams(group)
    for group in samples:
        harness.check_output(group)


def test_searches_that_wait_for_blocks_do_not_wait_for_each_other():
    """Computed again without a cache, the beams of the first share nothing, and the second has started meanwhile: each
    comes to have a beam that waits for blocks and one that waits for it."""
    harness = BeamHarness(num_blocks=8, caching=False, max_num_batched_tokens=40)
    groups = []
    for prompt, max_tokens in ((16, 6), (12, 18)):
        groups.append(harness.add_beams([len(groups)] * prompt, 2, max_tokens))
        groups[-1].search = ChurningBeams(BeamChurn(0.0), 0, 2, max_tokens)  # each beam goes on for itself
        if len(groups) == 1:
            harness.step()
            harness.step()
            harness.scheduler.preemptor.preempt(groups[0])
    harness.run()
    assert groups[1].metrics.num_preemptions > 0
    assert [[seq.num_output_tokens for seq in group.seqs] for group in groups] == [[6, 6], [18, 18]]


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_aborting_a_search_returns_all_blocks_and_what_there_is(num_steps):
    harness = BeamHarness(num_blocks=40, max_num_batched_tokens=11)
    group = harness.add_beams(PROMPT, 3, 8)
    for _ in range(num_steps):
        harness.step()
    harness.requests.remove(group)
    harness.blocks.check_integrity()
    assert harness.blocks.num_used_blocks == 0
    assert not harness.requests
    assert all(harness.requests.owners.get(seq.seq_id) is None for seq in group.seqs)
    for seq in group.unfinished_seqs:
        seq.finish(SequenceStatus.FINISHED_ABORTED)
    outputs = group.to_output().outputs
    assert [len(output.token_ids) for output in outputs] == [num_steps] * len(group.seqs)
    assert {output.finish_reason for output in outputs} == {"abort"}


def test_a_search_that_outgrows_the_cache_ends_with_what_it_has():
    harness = BeamHarness(num_blocks=4)
    group = harness.add_beams(PROMPT, 3, 30)
    harness.run()
    outputs = group.to_output().outputs
    assert "do not fit into the 4 blocks" in group.error
    assert [(len(output.token_ids), output.finish_reason) for output in outputs] == [(8, "length")] * 3
    scores = [output.cumulative_logprob for output in outputs]
    assert scores == sorted(scores, reverse=True)


def test_a_search_whose_room_is_pinned_while_a_beam_waits_ends_with_what_it_has():
    harness = BeamHarness(num_blocks=12, pinned_fraction=0.9, max_num_batched_tokens=40)
    group = harness.add_beams([9], 2, 40)
    group.search = ChurningBeams(BeamChurn(0.0), 0, 2, 40)  # each goes on for itself
    while group.seqs[0].num_tokens < 29 or group.seqs[0].num_uncomputed_tokens != 1:
        harness.step()
    first, second = group.seqs
    if second.status is SequenceStatus.RUNNING:
        harness.scheduler.preemptor.pause(group, second)
    harness.blocks.pins.pin(first.token_ids[:28])
    harness.blocks.check_integrity()
    while harness.requests:
        harness.step()
    assert "of which 7 are pinned" in group.error
    assert [output.finish_reason for output in group.to_output().outputs] == ["length"] * 2
    assert harness.blocks.num_used_blocks == 7


class AnyText:
    """A grammar of any text that remembers its tokens. With `can_go_on=False` it has become too complex."""

    error = "too many items"

    def __init__(self, can_go_on: bool = True, token_ids: Iterable[int] = ()) -> None:
        self.can_go_on, self.token_ids = can_go_on, list(token_ids)

    def mask(self) -> None:
        """Any token may be drawn."""

    def advance(self, token_id: int) -> bool:
        self.token_ids.append(token_id)
        return self.can_go_on

    def fork(self) -> "AnyText":
        return AnyText(self.can_go_on, self.token_ids)


def test_the_grammar_of_each_beam_follows_its_tokens():
    harness = BeamHarness(num_blocks=60)
    group = harness.add_beams(PROMPT, 4, 8)
    group.seqs[0].grammar = AnyText()
    for _ in range(7):
        harness.step()
        assert [seq.grammar.token_ids for seq in group.seqs] == [seq.output.token_ids for seq in group.seqs]
    harness.run()
    harness.check_beams(group)
    assert group.error is None


@pytest.mark.parametrize("place", [None, 0, 2])
def test_a_search_in_which_a_grammar_grows_too_complex_ends_and_says_why(place):
    """The grammars of all beams, or of one of them."""
    harness = BeamHarness(num_blocks=60)
    group, other = harness.add_beams(PROMPT, 3, 12), harness.add_beams([*PROMPT, 1], 2, 6)
    group.search = ChurningBeams(BeamChurn(0.0), 0, 3, 12)  # each goes on for itself
    for _ in range(3):
        harness.step()
    for seq in group.seqs if place is None else (group.seqs[place],):
        seq.grammar = AnyText(can_go_on=False)
    harness.step()
    assert group.error == "stopped after 4 tokens: too many items"
    assert {output.finish_reason for output in group.to_output().outputs} == {"length"}
    assert [seq.num_output_tokens for seq in group.seqs] == [4] * 3
    assert harness.requests.running == [other]
    harness.run()
    harness.check_beams(other)


def test_beams_of_a_search_that_has_ended_have_ended_too():
    harness = BeamHarness(num_blocks=60)
    group = harness.add_beams(PROMPT, 3, 2)
    harness.run()
    assert [seq.status for seq in group.seqs] == [SequenceStatus.FINISHED_STOPPED] * 3
    assert group.to_output().finished


def test_a_prompt_that_never_fits_is_ignored():
    harness = BeamHarness(num_blocks=3)
    group = harness.add_beams([1] * 13, 2)
    assert harness.step().ignored == (group.request_id,)
    (output,) = group.to_output().outputs
    assert (output.token_ids, output.finish_reason) == ([], "ignored")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beam_width": 0}, "beam_width=0: must be 1 to 256"),
        ({"beam_width": 257}, "beam_width=257"),
        ({"beam_width": 2.0}, "beam_width=2.0"),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1"),
        ({"max_tokens": None}, "max_tokens=None"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"length_penalty": 11}, "length_penalty=11: must be a number from -10 to 10"),
        ({"length_penalty": float("inf")}, "length_penalty=inf"),
        ({"early_stopping": "always"}, "early_stopping='always': must be True, False or 'never'"),
        ({"early_stopping": 1}, "early_stopping=1"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output='no': must be True or False"),
        ({"n": 4}, "n=4: must be 1 to beam_width=3"),
        ({"n": 0}, "n=0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        ({"priority": 2**40}, "priority"),
        ({"tenant": 3}, "tenant"),
        ({"ignore_eos": True, "structured_outputs": STRUCTURED}, "ignore_eos=True: with structured_outputs"),
    ],
)
def test_what_is_out_of_range_is_refused_when_it_is_said(fields, message):
    with pytest.raises(InvalidParamsError, match=message):
        BeamSearchParams(**{"beam_width": 3, "max_tokens": 5} | fields)


def test_a_seed_is_not_one_of_its_fields():
    with pytest.raises(InvalidParamsError, match="unknown parameter 'seed'"):
        BeamSearchParams(2, 3, seed=1)
    assert BeamSearchParams(4, 16) == BeamSearchParams(beam_width=4, max_tokens=16, early_stopping=False, n=None)


def test_what_the_engine_or_the_model_cannot_run_is_refused():
    harness = BeamHarness(max_num_seqs=4)
    with pytest.raises(InvalidParamsError, match="beam_width=5: this engine runs at most max_num_seqs=4"):
        harness.add_beams([1], 5)
    wide = BeamHarness(max_num_seqs=100)
    with pytest.raises(InvalidParamsError, match=r"beam_width=26 .* compares 52 candidates .* only 50 tokens"):
        wide.add_beams([1], 26)
    with pytest.raises(InvalidParamsError, match="needs a checkpoint with an end-of-sequence token"):
        wide.add_beams([1], 2, structured_outputs=STRUCTURED)
    assert not wide.requests

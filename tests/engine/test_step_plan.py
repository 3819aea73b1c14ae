"""The budgets of a step: what a sequence may compute, and when no more of them start."""

import pytest

from quire.common.params import SamplingParams
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence, SequenceGroup
from quire.engine.scheduling.step_plan import StepPlan


def request(num_tokens: int, num_computed: int = 0) -> tuple[SequenceGroup, Sequence]:
    """A request with one sequence of `num_tokens` tokens, the first `num_computed` of which are computed."""
    params = SamplingParams()
    seq = Sequence(0, [1] * num_tokens, (), SampleOutput(params))
    seq.num_computed_tokens = num_computed
    return SequenceGroup(OutputBuilder("0", seq.token_ids, params, 0.0), seq), seq


@pytest.mark.parametrize(
    ("num_uncomputed", "token_budget", "prefill_budget", "expected"),
    [
        (9, 20, 20, 9),
        (9, 5, 20, 5),
        (9, 20, 4, 4),
        (9, 3, 4, 3),
        (2, 20, 1, 1),
        (2, 20, 0, 0),
        (1, 20, 0, 1),
        (1, 0, 20, 0),
        (0, 20, 20, 0),
    ],
)
def test_a_chunk_is_limited_by_both_budgets_and_a_decode_by_the_tokens_of_the_step_alone(
    num_uncomputed, token_budget, prefill_budget, expected
):
    _, seq = request(10 + num_uncomputed, 10)
    assert StepPlan(token_budget, prefill_budget).chunk(seq) == expected


@pytest.mark.parametrize(
    ("num_uncomputed", "token_budget", "prefill_budget", "is_first", "expected"),
    [
        (9, 9, 9, False, 9),
        (9, 9, 8, False, 0),
        (9, 9, 8, True, 9),
        (9, 8, 9, True, 0),
        (1, 1, 0, False, 0),
    ],
)
def test_a_sequence_that_must_run_whole_runs_so_or_not_and_the_first_of_a_step_needs_no_budget_of_prompts(
    num_uncomputed, token_budget, prefill_budget, is_first, expected
):
    _, seq = request(10 + num_uncomputed, 10)
    seq.is_whole = True
    plan = StepPlan(token_budget, prefill_budget, scheduled=[] if is_first else [(*request(1), 1)])
    assert plan.chunk(seq) == expected


@pytest.mark.parametrize(
    ("num_uncomputed", "num_tokens", "left"),
    [(9, 9, (11, 3)), (9, 1, (19, 11)), (2, 2, (18, 10)), (2, 1, (19, 11)), (1, 1, (19, 12))],
)
def test_only_sequences_with_more_than_one_token_to_compute_use_the_budget_of_prompts(num_uncomputed, num_tokens, left):
    group, seq = request(10 + num_uncomputed, 10)
    plan = StepPlan(20, 12)
    plan.add(group, seq, num_tokens)
    assert (plan.token_budget, plan.prefill_budget) == left
    assert plan.scheduled == [(group, seq, num_tokens)]


@pytest.mark.parametrize(
    ("token_budget", "prefill_budget", "num_seqs", "num_wanted", "expected"),
    [
        (1, 1, 0, 8, False),
        (1, 1, 5, 3, False),
        (1, 1, 6, 3, True),
        (0, 1, 0, 1, True),
        (1, 0, 0, 1, True),
    ],
)
def test_a_step_is_full_without_tokens_for_prompts_or_with_too_many_sequences(
    token_budget, prefill_budget, num_seqs, num_wanted, expected
):
    assert StepPlan(token_budget, prefill_budget, num_seqs).is_full(8, num_wanted) is expected


def test_a_request_may_run_if_it_is_asked_for_and_in_no_batch_in_flight():
    group, other = request(3)[0], request(3)[0]
    assert StepPlan(1, 1).allows(group)
    assert StepPlan(1, 1, only={group}).allows(group)
    assert not StepPlan(1, 1, only={other}).allows(group)
    assert not StepPlan(1, 1, only=set()).allows(group)
    assert not StepPlan(1, 1, busy={group}).allows(group)
    assert not StepPlan(1, 1, only={group}, busy={group}).allows(group)

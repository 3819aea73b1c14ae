"""Which request is preempted when blocks run out, by which way, and what its tenant pays for it."""

import pytest

from quire.config.scheduler import SchedulerConfig
from quire.engine.scheduling.preemption import MAX_CANDIDATES, Preemptor
from quire.engine.scheduling.step_time import StepTimeModel

from .fake import Harness

TOKEN_S = 0.01


def step_time(token_s: float = TOKEN_S) -> StepTimeModel:
    model = StepTimeModel()
    model.observe(10, 10 * token_s)
    return model


def cost_of(harness: Harness, block_copy_s: float, mode: str | None = None) -> Preemptor:
    config = SchedulerConfig(8, 64, mode)
    return Preemptor(config, harness.requests, step_time(), block_copy_s)


def running(*prompts: list[int], num_host_blocks: int = 32, **settings: object) -> Harness:
    """Requests that have computed their prompts."""
    harness = Harness(num_blocks=64, num_host_blocks=num_host_blocks, max_num_batched_tokens=64, **settings)
    for prompt in prompts:
        harness.add(prompt, 20)
        harness.step()
    return harness


@pytest.mark.parametrize(
    ("policy", "params", "victim"),
    [
        ("fcfs", ({}, {}, {}), "cheap"),
        ("priority", ({"priority": 0}, {"priority": 1}, {"priority": 2}), "large"),
        ("fair", ({"tenant": "first"}, {"tenant": "cheap"}, {"tenant": "large"}), "large"),
    ],
)
def test_the_largest_rank_is_preempted_and_only_among_equal_ones_the_cheapest(policy, params, victim):
    """All seven blocks are in use when the first request needs another. `cheap` holds the fewest tokens per block,
    `large` has the lowest priority, and its tenant has been served most."""
    harness = Harness(num_blocks=7, caching=False, max_num_batched_tokens=64, policy=policy)
    harness.scheduler.step_time.observe(10, 0.1)
    first = harness.add([1] * 4, 8, **params[0])
    large = harness.add([3] * 13, 3, **params[2])
    cheap = harness.add([2] * 5, 3, **params[1])
    harness.step()
    harness.step()
    assert first.metrics.num_preemptions == 0
    assert (cheap.metrics.num_preemptions, large.metrics.num_preemptions) == (victim == "cheap", victim == "large")
    harness.run()
    for group in (first, large, cheap):
        harness.check_output(group)


def test_a_tenant_pays_once_for_tokens_that_are_computed_again():
    harness = Harness(num_blocks=16, caching=False, max_num_batched_tokens=32, policy="fair")
    group = harness.add([1] * 8, 12)
    harness.step()
    harness.step()
    assert harness.requests.policy.rank(group) == 9
    harness.scheduler.preemptor.preempt(group)
    assert harness.step().num_tokens == 10, "nine of them again"
    assert harness.requests.policy.rank(group) == 10


def test_a_tenant_pays_nothing_for_what_is_in_the_prefix_cache():
    harness = Harness(num_blocks=16, max_num_batched_tokens=32, policy="fair")
    harness.add([1] * 12, 1, tenant="a")
    harness.run()
    group = harness.add([*[1] * 8, 2], 4, tenant="b")
    floor = 12.0  # a new tenant starts where the last one stands
    harness.step()
    assert harness.requests.policy.rank(group) == floor + 1


def test_computing_again_costs_the_tokens_at_the_measured_pace():
    harness = running([1] * 7, [2] * 15, [3] * 3)
    cost = cost_of(harness, block_copy_s=1.0)
    estimates = [cost.estimate(group) for group in harness.groups]
    assert not any(estimate.by_swap for estimate in estimates)
    num_tokens = [9, 16, 3]  # the first two have decoded meanwhile
    assert [estimate.cost_s for estimate in estimates] == pytest.approx([n * TOKEN_S for n in num_tokens])
    assert [estimate.num_freed_blocks for estimate in estimates] == [3, 4, 1]


def test_only_the_share_of_blocks_that_no_other_request_holds_is_computed_again():
    harness = running([1] * 9, [*[1] * 8, 2, 3, 4])
    estimate = cost_of(harness, block_copy_s=1.0).estimate(harness.groups[1])
    assert estimate.num_freed_blocks == 1, "two of its three blocks are shared"
    assert estimate.cost_s == pytest.approx(11 * TOKEN_S / 3)


def test_swapping_costs_a_copy_out_and_back_of_each_block():
    harness = running([1] * 16)
    estimate = cost_of(harness, block_copy_s=0.001).estimate(harness.groups[0])
    assert estimate.by_swap
    assert estimate.cost_s == pytest.approx(2 * 4 * 0.001)
    assert estimate.group is harness.groups[0]


def test_a_single_block_can_be_swapped():
    harness = running([1] * 3)
    assert cost_of(harness, block_copy_s=0.0).estimate(harness.groups[0]).by_swap


def test_a_request_without_blocks_is_not_swapped():
    harness = running()
    waiting = harness.add([1] * 4, 4)
    estimate = cost_of(harness, block_copy_s=0.0).estimate(waiting)
    assert (estimate.by_swap, estimate.cost_s, estimate.num_freed_blocks) == (False, 0, 0)


@pytest.mark.parametrize(("block_copy_s", "by_swap"), [(0.0199, True), (0.02, True), (0.0201, False)])
def test_the_cheaper_way_is_taken_and_swapping_if_they_cost_the_same(block_copy_s, by_swap):
    """16 tokens at 10 ms against 4 blocks twice."""
    harness = running([1] * 16)
    assert cost_of(harness, block_copy_s).estimate(harness.groups[0]).by_swap is by_swap


@pytest.mark.parametrize(("mode", "num_host_blocks", "by_swap"), [("swap", 8, True), ("swap", 3, False),
                                                                  ("recompute", 8, False)])  # fmt: skip
def test_the_mode_that_is_asked_for_is_taken_if_possible(mode, num_host_blocks, by_swap):
    harness = running([1] * 16, num_host_blocks=num_host_blocks)
    block_copy_s = 0.0 if mode == "recompute" else 1.0
    estimate = cost_of(harness, block_copy_s, mode).estimate(harness.groups[0])
    assert estimate.by_swap is by_swap
    assert estimate.cost_s == pytest.approx(2 * 4 * block_copy_s if by_swap else 16 * TOKEN_S)


def test_swapping_is_taken_while_no_step_was_measured():
    harness = running([1] * 16)
    cost = Preemptor(SchedulerConfig(8, 64), harness.requests, StepTimeModel(), 1.0)
    assert cost.estimate(harness.groups[0]).by_swap


@pytest.mark.parametrize(("prompts", "cheapest"), [(([1] * 7, [2] * 5, [3] * 14), 1), (([1] * 3, [2] * 13), 1)])
def test_the_cheapest_is_the_one_that_costs_least_for_each_block_it_frees(prompts, cheapest):
    """Tokens and blocks are 9 in 3, 6 in 2 and 14 in 4; then 4 in 1 and 13 in 4."""
    harness = running(*prompts, caching=False)
    assert cost_of(harness, 1.0, "recompute").cheapest(harness.groups).group is harness.groups[cheapest]


def test_of_equally_cheap_ones_the_newest_is_preempted():
    harness = running([1] * 16, [2] * 16, [3] * 16, caching=False)
    assert cost_of(harness, 0.001, "swap").cheapest(harness.groups).group is harness.groups[2]


def test_a_request_that_frees_nothing_is_never_the_cheapest():
    harness = running([1] * 16, [2] * 16, caching=False)
    shared, other = harness.groups
    harness.blocks.fork(shared.seqs[0].seq_id, 99)
    cost = cost_of(harness, 0.0, "recompute")
    assert cost.estimate(shared).num_freed_blocks == 0
    assert cost.cheapest([shared, other]).group is cost.cheapest([other, shared]).group is other


def test_only_the_newest_few_are_compared():
    prompts = [[1] * 5, *([token_id] * 16 for token_id in range(2, MAX_CANDIDATES + 2))]
    harness = running(*prompts, caching=False)
    cost = cost_of(harness, 1.0, "recompute")
    assert cost.cheapest(harness.groups[:MAX_CANDIDATES]).group is harness.groups[0]
    assert cost.cheapest(harness.groups).group is not harness.groups[0]


def test_every_preemption_is_counted():
    harness = running([1] * 6, [2] * 6, preemption_mode="swap")
    first, second = harness.groups
    preemptor = harness.scheduler.preemptor
    assert (preemptor.num_preemptions, preemptor.num_preemptions_by_swap) == (0, 0)
    for group in (first, second):
        preemptor.preempt(group)
    harness.step()  # both come back
    preemptor.preempt(first)
    assert (preemptor.num_preemptions, preemptor.num_preemptions_by_swap) == (3, 3)
    assert (first.metrics.num_preemptions, second.metrics.num_preemptions) == (2, 1)


def test_the_preemption_of_one_sample_is_counted_but_not_for_its_request():
    harness = running()
    group = harness.add([1] * 6, 20, n=3)
    harness.step()
    preemptor = harness.scheduler.preemptor
    for seq in group.seqs[1:]:
        preemptor.pause(group, seq)
    assert (preemptor.num_preemptions, preemptor.num_preemptions_by_swap) == (2, 0)
    assert group.metrics.num_preemptions == 0


@pytest.mark.parametrize(("mode", "event"), [("swap", "swapped out"), ("recompute", "preempted")])
def test_the_view_learns_which_request_is_preempted_and_how(mode, event):
    harness = running([1] * 6, preemption_mode=mode)
    harness.requests.journal = []
    harness.scheduler.preemptor.preempt(harness.groups[0])
    assert harness.requests.journal == [(event, harness.groups[0])]


def test_the_view_learns_that_a_sample_is_preempted():
    harness = running()
    group = harness.add([1] * 6, 20, n=2)
    harness.step()
    harness.requests.journal = []
    harness.scheduler.preemptor.pause(group, group.seqs[1])
    assert harness.requests.journal == [("preempted", group)]


@pytest.mark.parametrize("n", [1, 2])
def test_what_was_computed_of_the_last_block_is_found_again_after_a_preemption(n):
    """Of 8 tokens a full block and 3 tokens of the next are computed; the newest has to be computed in any case."""
    harness = running(preemption_mode="recompute")
    group = harness.add([1] * 6, 20, n=n)
    harness.step()
    harness.step()
    if n == 1:
        harness.scheduler.preemptor.preempt(group)
    else:
        harness.scheduler.preemptor.pause(group, group.seqs[1])
    assert harness.step().num_tokens == n
    harness.run()
    harness.check_output(group)


def test_a_request_in_a_batch_in_flight_is_not_preempted_for_another():
    harness = running([1] * 6, [2] * 6, [3] * 6)
    first, second, third = harness.groups
    preemptor = harness.scheduler.preemptor
    assert not preemptor.preempt_behind(0, {second, third})
    assert preemptor.preempt_behind(0, {third})
    assert harness.requests.running == [first, third]


def test_the_request_that_is_being_planned_stays_known_when_another_is_preempted_for_it():
    harness = running([1] * 6, [2] * 6)
    harness.requests.planning_group = harness.groups[0]
    assert harness.scheduler.preemptor.preempt_behind(0, set())
    assert harness.requests.planning_group is harness.groups[0]

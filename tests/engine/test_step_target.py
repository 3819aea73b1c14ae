"""Prompts are cut so that a step takes about as long as it may, and who decodes gets a token in each."""

import pytest

from quire.engine.scheduling.scheduler import FIRST_CHUNK, MIN_CHUNK

from .fake import Harness

SLOPE_S = 0.001


def run_step(harness: Harness, fixed_s: float = 0.01, slope_s: float = SLOPE_S) -> int:
    """A step on a machine that takes so long; returns its tokens."""
    num_tokens = harness.step().num_tokens
    harness.scheduler.step_time.observe(num_tokens, fixed_s + slope_s * num_tokens)
    return num_tokens


def make_harness(target_step_ms: float | None) -> Harness:
    return Harness(num_blocks=600, max_num_batched_tokens=400, target_step_ms=target_step_ms)


def test_without_a_target_a_prompt_takes_the_whole_step():
    harness = make_harness(None)
    harness.add([1] * 1000, 1)
    assert run_step(harness) == 400


def test_the_chunk_is_what_the_measured_time_allows():
    harness = make_harness(110.0)
    harness.add([1] * 2000, 1)
    assert run_step(harness) == FIRST_CHUNK, "nothing is known yet"
    chunks = [run_step(harness) for _ in range(8)]
    assert chunks[-1] == pytest.approx(100, rel=0.15), "10 ms and 1 ms for each token"
    assert max(chunks) <= 2 * FIRST_CHUNK


def test_the_chunk_follows_a_machine_that_becomes_slower():
    harness = make_harness(110.0)
    harness.add([1] * 2200, 1)
    for _ in range(6):
        before = run_step(harness)
    for _ in range(40):
        after = run_step(harness, 0.03, 3 * SLOPE_S)
    assert before == pytest.approx(100, rel=0.15)
    assert MIN_CHUNK <= after <= before / 2


def test_a_target_that_nothing_meets_still_lets_prompts_go_on():
    harness = make_harness(1.0)
    harness.add([1] * 500, 1)
    run_step(harness)
    assert run_step(harness) == run_step(harness) == MIN_CHUNK


@pytest.mark.parametrize("target_step_ms", [1.0, 60.0, None])
def test_who_decodes_gets_a_token_in_every_step_beside_long_prompts(target_step_ms):
    harness = make_harness(target_step_ms)
    decoding = [harness.add([token_id], 40) for token_id in range(5)]
    run_step(harness)
    prompts = [harness.add([9] * 150 + [token_id], 2) for token_id in range(3)]
    for num_output_tokens in range(2, 39):
        run_step(harness)
        assert [len(harness.output(group)) for group in decoding] == [num_output_tokens] * 5
    harness.run()
    for group in [*decoding, *prompts]:
        harness.check_output(group)


@pytest.mark.parametrize("target_step_ms", [60.0, None])
def test_a_long_prompt_that_comes_first_leaves_a_token_to_each_that_decodes(target_step_ms):
    harness = Harness(num_blocks=600, max_num_batched_tokens=20, target_step_ms=target_step_ms, policy="priority")
    decoding = [harness.add([token_id], 40, priority=1) for token_id in range(5)]
    run_step(harness)
    prompt = harness.add([9] * 150, 2, priority=0)
    for num_output_tokens in range(2, 9):
        assert run_step(harness) == 20, "the prompt takes all the others leave"
        assert [len(harness.output(group)) for group in decoding] == [num_output_tokens] * 5
    harness.run()
    for group in [*decoding, prompt]:
        harness.check_output(group)

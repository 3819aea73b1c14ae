"""Tokens drafted by anything, right or wrong, change nothing but the number of steps."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import LLM, SamplingParams
from quire.common.params import StructuredOutputsParams
from quire.config.scheduler import POLICIES
from quire.engine.requests.sequence import Sequence, SequenceGroup

from .fake import Harness, drafting_by, expected_output
from .test_schedule import requests


class Guesser:
    """Knows what the fake model will say, and errs as often as it is asked to."""

    def __init__(self, windows: tuple[int | None, ...] = (None,), num_drafts: int = 3, error_rate: float = 0.0) -> None:
        self.windows, self.num_drafts, self.error_rate = windows, num_drafts, error_rate
        self.rng = random.Random(0)

    def __call__(self, group: SequenceGroup, seq: Sequence) -> list[int]:
        prompt = seq.token_ids[: seq.num_prompt_tokens]
        tokens = expected_output(prompt, group.params.max_tokens, self.windows, seq.output.index)[
            seq.num_output_tokens :
        ]
        return [(t + (self.rng.random() < self.error_rate)) % 50 for t in tokens[: self.num_drafts]]


@settings(max_examples=200, deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(15, 30),
    windows=st.sampled_from([(None,), (6,), (None, 6), (3, None, 9)]),
    max_num_seqs=st.integers(3, 6),
    max_num_batched_tokens=st.integers(1, 20),
    caching=st.booleans(),
    num_host_blocks=st.integers(0, 16),
    failing_steps=st.sets(st.integers(0, 40), max_size=4),
    policy=st.sampled_from(POLICIES),
    preempt_turns=st.integers(0, 12),
    num_drafts=st.integers(1, 6),
    error_rate=st.sampled_from([0.0, 0.3, 1.0]),
    depth=st.integers(1, 3),
)
def test_drafts_and_batches_in_flight_leave_the_solo_tokens(requests, num_drafts, error_rate, **settings):
    harness = Harness(draft=Guesser(settings["windows"], num_drafts, error_rate), **settings)
    groups = [harness.add(**request) for request in requests]
    harness.run()
    for group in groups:
        harness.check_output(group)


@pytest.mark.parametrize("error_rate", [0.0, 0.5, 1.0])
def test_a_prompt_whose_step_verifies_drafts_counts_as_computed(error_rate):
    harness = Harness(num_blocks=20, draft=Guesser(error_rate=error_rate))
    group = harness.add([1] * 6, 12)
    harness.run()
    assert group.metrics.first_token_time is not None
    assert harness.committer.num_prompt_tokens == 6
    harness.add([1] * 6, 12)
    assert harness.step().sequences[0].start == 5, "all but the last token is found"


@pytest.mark.parametrize(("error_rate", "num_steps"), [(0.0, 3), (1.0, 12)])
def test_right_drafts_save_steps_and_wrong_ones_cost_none(error_rate, num_steps):
    harness = Harness(num_blocks=20, draft=Guesser(error_rate=error_rate))
    group = harness.add([1] * 6, 12)
    harness.run()
    harness.check_output(group)
    assert harness.scheduler.num_steps == num_steps


def test_only_accepted_tokens_can_be_found_in_the_cache():
    harness = Harness(num_blocks=20, draft=Guesser(error_rate=1.0))
    group = harness.add([1] * 6, 12)
    while len(group.seqs[0].token_ids) < 9:
        harness.step()
    seq = group.seqs[0]
    assert harness.executor.batches[-1].sequences[0].num_drafts == 3
    assert harness.executor.batches[-1].sequences[0].end > len(seq.token_ids)
    drafted = [*seq.token_ids[:8], *harness.executor.batches[-1].sequences[0].token_ids[-3:], 0]
    assert harness.blocks.look_up(99, [*seq.token_ids, 0]).num_blocks == 2
    assert harness.blocks.look_up(98, drafted).num_blocks == 2
    assert seq.num_computed_tokens == len(seq.token_ids) - 1


def test_drafts_take_only_what_nothing_else_needs():
    harness = Harness(num_blocks=6, max_num_batched_tokens=4, max_num_seqs=3, draft=Guesser(num_drafts=8))
    groups = [harness.add([i] * 3, 5) for i in range(3)]
    harness.run()
    for group in groups:
        harness.check_output(group)
    batches = harness.executor.batches
    assert any(s.num_drafts for batch in batches for s in batch.sequences)
    assert all(sum(s.drawn.num_rows for s in batch.sequences if s.drawn) <= 3 for batch in batches)
    plain = Harness(num_blocks=6, max_num_batched_tokens=4, max_num_seqs=3)
    for i in range(3):
        plain.add([i] * 3, 5)
    plain.run()
    assert harness.scheduler.preemptor.num_preemptions <= plain.scheduler.preemptor.num_preemptions


def test_all_rows_of_a_step_together_are_limited():
    harness = Harness(num_blocks=40, max_num_batched_tokens=32, max_num_seqs=4, draft=Guesser())
    for token_id in (1, 2):
        harness.add([token_id] * 3, 8)
    harness.step()
    assert [scheduled.num_drafts for scheduled in harness.step().sequences] == [2, 0]


def test_a_sequence_that_is_computed_again_in_chunks_verifies_no_drafts_before_its_end():
    """A step of 17 tokens takes as long as it may: 16 of the prompt and one that is decoded."""
    harness = Harness(
        num_blocks=40, max_num_batched_tokens=40, caching=False, target_step_ms=17, draft=Guesser(num_drafts=2)
    )
    first, second = harness.add([1] * 35, 8), harness.add([2] * 3, 30)
    while not (first.seqs[0].num_output_tokens and second.seqs[0].num_output_tokens):
        harness.step()
    harness.scheduler.preemptor.preempt(first)
    harness.scheduler.step_time.observe(17, 0.017)
    harness.step()
    batches = [harness.step() for _ in range(2)]
    drafts = [[(len(s.token_ids), s.num_drafts) for s in batch.sequences] for batch in batches]
    assert drafts[0] == [(16, 0), (3, 2)]
    assert drafts[1][0][1] == 2, "at its end it does again"
    harness.run()
    for group in (first, second):
        harness.check_output(group)


def test_what_stands_behind_a_stop_is_dropped():
    expected = expected_output([1] * 6, 12)
    stop = next(token for token in expected[4:] if expected.index(token) >= 4)
    harness = Harness(num_blocks=20, draft=Guesser(num_drafts=8), eos=frozenset([stop]))
    group = harness.add([1] * 6, 12)
    harness.run()
    assert harness.output(group) == expected[: expected.index(stop) + 1]


REQUESTS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 3, "top_p": 0.9},
    "penalized": {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2, "bad_words": ["the"], "min_tokens": 5},
    "grammar": {"structured_outputs": StructuredOutputsParams(regex="[a-d]{3}(red|green){4}[0-9]{5}"), "seed": 1},
    "samples": {"n": 2, "temperature": 1.0, "seed": 5},
    "logprobs": {"temperature": 1.0, "seed": 6, "logprobs": 3, "logprobs_mode": None},
    "processor": {"seed": 7, "logits_processors": [lambda output, logits: logits - len(output) % 2 * logits]},
}


@pytest.mark.parametrize("arguments", [{}, {"quantization": "int8", "kv_cache_dtype": "int8"}])
def test_a_real_model_says_the_same_with_drafts(arguments):
    def run(draft) -> tuple[dict[str, list], int]:
        engine = LLM(max_model_len=128, num_gpu_blocks_override=64, **arguments).engine
        drafting = drafting_by(draft, 128) if draft else None
        engine.scheduler.drafting = engine.committer.drafting = drafting
        for name, params in REQUESTS.items():
            given = {key: value for key, value in params.items() if value is not None}
            engine.add_request(name, f"What does {name} do?", SamplingParams(**{"max_tokens": 24} | given))
        outputs, num_steps = {}, 0
        while engine.has_unfinished_requests():
            for output in engine.step():  # one for each request that was in the step
                num_steps += 1
                outputs[output.request_id] = [(s.token_ids, s.text, s.logprobs) for s in output.outputs]
            engine.requests.check_integrity()
        return outputs, num_steps

    expected, num_steps = run(None)
    told = {name: [tokens for tokens, _, _ in samples] for name, samples in expected.items()}
    rng = random.Random(1)

    def draft(group: SequenceGroup, seq: Sequence) -> list[int]:
        tokens = told[group.request_id][seq.output.index][seq.num_output_tokens :][:4]
        return [token if rng.random() < 0.8 else 5 for token in tokens]

    actual, num_steps_with = run(draft)
    assert actual == expected
    assert num_steps_with < num_steps

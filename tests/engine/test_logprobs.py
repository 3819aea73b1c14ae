"""Log-probabilities and scores: those of the solo run under any schedule, each told once, whatever the cache holds."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.batch import Draw
from quire.common.outputs import Logprob
from quire.common.params import SamplingParams
from quire.engine.requests.logprobs import LogprobRows, PromptScores
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence, SequenceGroup
from tests.effort import examples
from tests.scripted_engine import logprobs

from .fake import Harness, expected_logprobs, joined, token_logprobs

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]

tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
requests = st.lists(
    st.one_of(
        st.fixed_dictionaries(
            {"prompt": tokens, "max_tokens": st.integers(1, 5)},
            optional={
                "n": st.integers(1, 3),
                "logprobs": st.integers(0, 3),
                "prompt_logprobs": st.integers(0, 3),
            },
        ),
        st.fixed_dictionaries({"context": tokens, "continuation": st.lists(st.integers(0, 1), min_size=1, max_size=6)}),
    ),
    min_size=1,
    max_size=10,
)


def as_dicts(rows: list) -> list[dict[int, tuple[float, int]]]:
    """The definition of what is told: the token itself, then the likeliest that are not it, with their ranks."""
    told = []
    for row in rows:
        token_id, *top = row.token_ids[0].tolist()
        logprob, *others = row.logprobs[0].tolist()
        entries = {token_id: (logprob, int(row.ranks[0]))}
        entries |= {t: (p, i) for i, (t, p) in enumerate(zip(top, others, strict=True), start=1) if t != token_id}
        told.append(entries)
    return told


def plain(told: list[dict[int, Logprob] | None]) -> list[dict[int, tuple[float, int]] | None]:
    return [entries and {t: (entry.logprob, entry.rank) for t, entry in entries.items()} for entries in told]


def check(group: SequenceGroup, windows: tuple[int | None, ...] = (None,)) -> None:
    """What a request was told is what the model says of its tokens, worked out without any engine."""
    output = group.to_output()
    prompt, params = group.outputs.prompt_token_ids, group.params
    for sample in output.outputs if params.logprobs is not None else ():
        rows = expected_logprobs(prompt + sample.token_ids, len(prompt), params.logprobs, windows)
        assert plain(sample.logprobs) == as_dicts(rows)
        assert sample.cumulative_logprob == sum(float(row.logprobs[0, 0]) for row in rows)
    if params.prompt_logprobs is not None:
        expected = as_dicts(expected_logprobs(prompt, 1, params.prompt_logprobs, windows))
        assert plain(output.prompt_logprobs) == [None, *expected]
    elif group.outputs.scores is not None:
        whole = prompt[: group.outputs.scores.first] + group.outputs.scores.token_ids
        first = group.outputs.scores.first
        assert plain(output.prompt_logprobs) == [None] * first + as_dicts(expected_logprobs(whole, first, 0, windows))
    else:
        assert output.prompt_logprobs is None


@pytest.mark.essential
@settings(max_examples=examples(200), deadline=None)
@given(
    requests=requests,
    num_blocks=st.integers(16, 30),
    windows=st.sampled_from([(None,), (6,), (None, 6)]),
    max_num_seqs=st.integers(3, 6),
    max_num_batched_tokens=st.integers(1, 20),
    caching=st.booleans(),
    num_host_blocks=st.integers(0, 16),
    preemption_mode=st.sampled_from([None, "swap", "recompute"]),
    failing_steps=st.sets(st.integers(0, 40), max_size=4),
    stagger=st.integers(0, 3),
    preempt_turns=st.integers(0, 12),
    policy=st.sampled_from(["fcfs", "prefix"]),
)
def test_every_schedule_gives_the_solo_logprobs(requests, stagger, windows, **settings):
    harness = Harness(windows=windows, **settings)
    for request in requests:
        (harness.add if "prompt" in request else harness.add_scored)(**request)
        for _ in range(stagger):
            harness.step()
    harness.run()
    for group in harness.groups:
        check(group, windows)
        if group.seqs[0].draws:
            harness.check_output(group)
    stats = harness.blocks.stats
    assert stats.num_queried_tokens == stats.num_hit_tokens + sum(stats.num_missed_tokens.values())


def test_prompt_logprobs_come_also_where_the_whole_prompt_is_cached():
    harness = Harness(num_blocks=20)
    harness.add(PROMPT, 1)
    harness.run()
    queried = harness.blocks.stats.num_queried_tokens
    group = harness.add(PROMPT, 1, prompt_logprobs=2)
    harness.run()
    check(group)
    assert group.num_cached_tokens == 0
    assert harness.blocks.stats.num_queried_tokens == queried, "what must be computed anyway is not looked for"
    again = harness.add(PROMPT, 1)
    harness.run()
    assert again.num_cached_tokens == len(PROMPT) - 1


def test_continuations_of_one_context_compute_it_once():
    harness = Harness(num_blocks=40, max_num_batched_tokens=64)
    groups = [harness.add_scored(PROMPT, [token_id, 7, 7]) for token_id in range(4)]
    harness.run()
    for group in groups:
        check(group)
    assert groups[0].num_cached_tokens == 0
    assert [group.num_cached_tokens for group in groups[1:]] == [8, 8, 8], "the last token predicts the first scored"
    num_computed = sum(batch.num_tokens for batch in harness.executor.batches)
    assert num_computed == len(PROMPT) + 2 + 3 * 3
    assert all(s.drawn is None for batch in harness.executor.batches for s in batch.sequences)
    assert harness.committer.num_generated_tokens == 0
    stats = harness.blocks.stats
    assert stats.num_queried_tokens == 4 * 8 == stats.num_hit_tokens + sum(stats.num_missed_tokens.values())


def test_what_is_scored_is_not_scored_again_after_a_preemption():
    harness = Harness(num_blocks=20, max_num_batched_tokens=3, caching=False, preemption_mode="recompute")
    group = harness.add(PROMPT, 2, prompt_logprobs=1)
    for _ in range(2):
        harness.step()
    harness.scheduler.preemptor.preempt(group)
    harness.run()
    check(group)
    scored = [s.scored for batch in harness.executor.batches for s in batch.sequences if s.scored]
    assert [token_id for part in scored for token_id in part.token_ids] == PROMPT[1:]


def test_scored_blocks_count_as_cached_once_they_are_scored():
    """Preempted after six tokens: one full block is scored through, and is taken from the cache the second time."""
    harness = Harness(num_blocks=20, max_num_batched_tokens=6, preemption_mode="recompute")
    group = harness.add(PROMPT, 1, prompt_logprobs=0)
    harness.step()
    harness.scheduler.preemptor.preempt(group)
    harness.run()
    check(group)
    assert [batch.sequences[0].start for batch in harness.executor.batches] == [0, 6]


def test_rows_made_a_few_at_a_time_are_the_rows_made_at_once():
    token_ids = list(range(10))
    slowly, at_once = LogprobRows(str), LogprobRows(str)
    for rows in (slowly, at_once):
        rows.extend(logprobs(token_ids, 2))
    assert [slowly.make(4), slowly.make(4), slowly.make(4)] == [True, True, False]
    assert slowly.to_dicts(3) == at_once.to_dicts(3)
    assert len(slowly) == len(token_ids)


def test_a_failed_step_scores_nothing():
    harness = Harness(num_blocks=20, failing_steps={0, 2})
    group = harness.add(PROMPT, 3, prompt_logprobs=1, logprobs=1)
    harness.run()
    check(group)


def test_deltas_bring_each_row_once():
    rows = LogprobRows(None)
    params, scores = SamplingParams(output_kind="delta", logprobs=0, prompt_logprobs=0), PromptScores(1, [2], 0, None)
    sample = SampleOutput(params, logprobs=rows)
    outputs = OutputBuilder("a", [1, 2], params, 0.0, scores=scores)
    scores.rows.extend(token_logprobs([5], 2, 0))
    told = []
    for token_id in (7, 8, 9):
        sample.append(token_id)
        rows.extend(token_logprobs([token_id], token_id, 0))
        output = outputs.to_output([sample])
        told += output.outputs[0].logprobs
        assert (output.prompt_logprobs is None) == (token_id != 7)
    assert [list(entries) for entries in told] == [[7], [8], [9]]


def test_the_text_of_a_token_is_made_only_when_it_is_emitted():
    made = []
    rows = LogprobRows(lambda token_id: made.append(token_id) or f"<{token_id}>")
    rows.extend(joined([token_logprobs([1], 4, 2), token_logprobs([2], 5, 2)]))
    assert made == []
    told = rows.to_dicts()
    assert [entries[token_id].decoded_token for entries, token_id in zip(told, (4, 5), strict=True)] == ["<4>", "<5>"]
    num_made = len(made)
    assert rows.to_dicts(1) == told[1:]
    assert len(made) == num_made
    other = rows.fork()
    other.extend(token_logprobs([3], 6, 0))
    assert (len(rows), len(other)) == (2, 3)


@pytest.mark.parametrize("n", [1, 2])
def test_the_likeliest_samples_come_out_best_first(n):
    harness = Harness(num_blocks=40, max_num_batched_tokens=64)
    group = harness.add(PROMPT, 5, n=n, best_of=4, temperature=1.0)
    while harness.requests:
        assert group.to_output() is None, "nothing before the end"
        harness.step()
    sums = []
    for sample in range(4):
        rows = expected_logprobs(PROMPT + harness.output(group, sample), len(PROMPT))
        sums.append((sum(float(row.logprobs[0, 0]) for row in rows), harness.output(group, sample)))
    best = sorted(sums, reverse=True)[:n]
    output = group.to_output()
    assert [(o.cumulative_logprob, o.token_ids) for o in output.outputs] == best
    assert [o.index for o in output.outputs] == list(range(n))
    assert all(o.logprobs is None for o in output.outputs), "nobody asked"


def test_past_is_all_tokens_and_a_fork_has_its_own():
    seq = Sequence(0, [1, 2, 3], (Draw(0.0, 0, 1.0, b"", presence_penalty=1.0),), SampleOutput(SamplingParams()))
    views = []
    for token_id in range(20):
        views.append((seq.history(), list(seq.token_ids)))
        seq.extend((token_id,))
    assert all(view.tolist() == token_ids for view, token_ids in views), "earlier views stay as they were"
    bases = [view.base for view, _ in views]
    assert len({id(base) for base in bases}) <= 4, "memory grows by doubling"
    fork = seq.fork(1, seq.draws[0])
    fork.token_ids[-1] = 99
    assert fork.history().tolist() == [*seq.token_ids[:-1], 99]
    assert seq.history().tolist() == seq.token_ids
    assert not Sequence(2, [1], (Draw(0.0, 0, 1.0, b""),), SampleOutput(SamplingParams())).needs_history


def test_scores_are_due_where_their_rows_are_computed():
    whole = list(range(10))
    for first, chunk in itertools.product(range(1, 10), range(1, 6)):
        scores = PromptScores(first, whole[first:], 0, None)
        for start in range(0, 9, chunk):
            due = scores.due(start, min(9, start + chunk))
            if due is not None:
                assert due.token_ids == tuple(whole[start + due.row + 1 :][: len(due.token_ids)])
                scores.rows.extend(joined([token_logprobs([0], token_id, 0) for token_id in due.token_ids]))
        assert scores.max_cached_tokens is None
        assert len(scores.rows) == 10 - first

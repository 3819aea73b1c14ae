"""A sequence and a request by themselves: what a fork has in common with its parent, the history, and how they end."""

from types import SimpleNamespace

import numpy as np
import pytest

from quire.common.batch import Draw, PoolSpec
from quire.common.lora import KnownAdapter
from quire.common.outputs import RequestMetrics
from quire.common.params import SamplingParams
from quire.engine.requests.output import OutputBuilder, SampleOutput, places_from
from quire.engine.requests.pooling import PromptPooling
from quire.engine.requests.sequence import Sequence, SequenceGroup, SequenceStatus

FIRST, SECOND = (Draw(1.0, 0, 1.0, b"", index) for index in range(2))


class Grammar:
    """A grammar that knows only what it was forked from."""

    def __init__(self, parent: "Grammar | None" = None) -> None:
        self.parent = parent

    def fork(self) -> "Grammar":
        return Grammar(self)


def make_sequence(*token_ids: int, draws: tuple[Draw, ...] = (FIRST,)) -> Sequence:
    return Sequence(5, list(token_ids), draws, SampleOutput(SamplingParams(n=2)))


def make_group(seq: Sequence, **arguments: object) -> SequenceGroup:
    return SequenceGroup(OutputBuilder("name", seq.token_ids, seq.output.params, 0.0), seq, **arguments)


def test_all_tokens_of_a_new_sequence_are_to_be_computed():
    seq = make_sequence(1, 2, 3)
    assert (seq.num_tokens, seq.num_output_tokens, seq.num_uncomputed_tokens) == (3, 0, 3)
    assert seq.status is SequenceStatus.WAITING
    assert seq.drafting is None


def test_the_executor_learns_how_many_tokens_are_the_prompt():
    seq = make_sequence(1, 2, 3)
    seq.extend([4])
    assert (seq.drawn_rows.draws, seq.drawn_rows.num_prompt_tokens) == ((FIRST,), 3)
    assert make_sequence(1, 2, 3, draws=()).drawn_rows is None


def test_a_fork_continues_by_itself_from_where_its_parent_is():
    parent = make_sequence(1, 2, 3)
    parent.extend([4])
    parent.num_computed_tokens, parent.num_served_tokens, parent.status = 3, 2, SequenceStatus.RUNNING
    parent.grammar = Grammar()
    child = parent.fork(9, SECOND)
    assert (child.seq_id, child.draws, child.output.index) == (9, (SECOND,), 1)
    assert (child.token_ids, child.output.token_ids, child.num_prompt_tokens) == ([1, 2, 3, 4], [4], 3)
    assert (child.num_computed_tokens, child.num_served_tokens) == (3, 2)
    assert child.status is SequenceStatus.RUNNING
    assert child.grammar.parent is parent.grammar
    child.extend([7])
    assert (parent.token_ids, parent.output.token_ids) == ([1, 2, 3, 4], [4])
    parent.grammar = None
    assert parent.fork(10, SECOND).grammar is None


def test_a_history_has_all_tokens_and_is_copied_only_when_its_memory_is_full():
    seq = make_sequence(1, 2, 3)
    first = seq.history()
    assert (first.tolist(), first.dtype) == ([1, 2, 3], np.int32)
    assert first.base.nbytes == 2 * first.nbytes
    seq.extend([4, 5, 6])
    assert seq.history().tolist() == [1, 2, 3, 4, 5, 6]
    assert seq.history().base is first.base, "six tokens are twice three"
    seq.extend([7])
    assert seq.history().tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert seq.history().base is not first.base


def test_a_request_knows_the_sequences_that_it_will_have():
    seq = make_sequence(1, 2, draws=(FIRST, SECOND))
    group = make_group(seq)
    assert (group.request_id, group.order, group.num_wanted_seqs, group.processors) == ("name", 5, 2, ())
    seq.draw_with((FIRST,))
    group.seqs.append(seq.fork(6, SECOND))
    assert group.num_wanted_seqs == 2
    group.seqs[1].finish(SequenceStatus.FINISHED_STOPPED)
    assert group.num_wanted_seqs == 1
    assert make_group(make_sequence(1, 2, draws=())).num_wanted_seqs == 1, "it is only scored"


def test_a_resumed_request_emits_only_what_comes_after_the_tokens_that_were_emitted_before():
    seq = make_sequence(1, 2, 3)
    seq.output.detokenizer = SimpleNamespace(stable_text=lambda finished: "new text")
    group, metrics = make_group(seq), RequestMetrics(7.0)
    group.resume([8, 9], metrics, 3)
    assert (seq.token_ids, seq.num_prompt_tokens, seq.num_uncomputed_tokens) == ([1, 2, 3, 8, 9], 3, 5)
    assert (group.metrics, group.num_cached_tokens) == (metrics, 3)
    seq.extend([10])
    delta = seq.output.to_completion(delta=True)
    assert (delta.token_ids, delta.text) == ([10], "new text")


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_text_that_is_pooled_whole_takes_nothing_from_the_cache(is_whole):
    pooling = PromptPooling(PoolSpec("embed"), 3, is_whole=is_whole)
    seq = Sequence(5, [1, 2, 3], (), SampleOutput(SamplingParams()), pooling=pooling)
    assert (seq.is_whole, seq.max_cached_tokens) == (is_whole, 0 if is_whole else None)
    assert (make_sequence(1).is_whole, make_sequence(1).max_cached_tokens) == (False, None)


def test_a_scored_prompt_takes_no_more_from_the_cache_than_its_scores_allow():
    scores = SimpleNamespace(max_cached_tokens=2)
    seq = Sequence(5, [1, 2, 3], (), SampleOutput(SamplingParams()), scores)
    assert seq.max_cached_tokens == 2


def test_accepted_drafts_are_counted_from_the_first_token_of_a_delta():
    output = make_sequence(1).output
    output.token_ids, output.accepted_drafts = [10, 11, 12, 13, 14], [1, 2, 4]
    from_start = [places_from(output.accepted_drafts, start) for start in range(6)]
    assert from_start == [[1, 2, 4], [0, 1, 3], [0, 2], [1], [0], []]
    assert output.fork(1).accepted_drafts == [1, 2, 4]
    assert output.to_completion(delta=True).accepted_drafts == [1, 2, 4]
    output.token_ids += [15, 16]
    output.accepted_drafts += [6]
    assert output.to_completion(delta=True).accepted_drafts == [1]
    assert output.to_completion().accepted_drafts == [1, 2, 4, 6]


def test_an_output_has_the_vector_and_names_the_adapter():
    pooling, vector = PromptPooling(PoolSpec("embed"), 3, is_whole=False), np.ones(2, np.float32)
    params, adapter = SamplingParams(), KnownAdapter("name", 4, "/folder", "digest", 1, "given")
    seq = Sequence(5, [1, 2, 3], (), SampleOutput(params), pooling=pooling)
    group = SequenceGroup(OutputBuilder("name", [1, 2, 3], params, 0.0, pooling=pooling, adapter=adapter), seq)
    pooling.result = vector
    seq.finish(SequenceStatus.FINISHED_STOPPED)
    assert group.to_output().pooled is vector
    assert group.to_output().lora_request == group.to_failed_output().lora_request == adapter.request
    plain = make_group(make_sequence(1)).to_output()
    assert (plain.pooled, plain.lora_request) == (None, None)


@pytest.mark.parametrize(
    ("status", "error", "has_failed"),
    [
        (SequenceStatus.FINISHED_ABORTED, "its own work failed", True),
        (SequenceStatus.FINISHED_ABORTED, None, False),
        (SequenceStatus.FINISHED_LENGTH_CAPPED, "the cache is too small for more", False),
        (SequenceStatus.FINISHED_STOPPED, None, False),
    ],
)
def test_a_request_has_failed_if_it_was_aborted_with_an_error(status, error, has_failed):
    seq = make_sequence(1, 2)
    group = make_group(seq)
    group.error = error
    seq.finish(status)
    assert group.has_failed is has_failed

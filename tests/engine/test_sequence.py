"""A sequence and a request by themselves: what a fork has in common with its parent, the history, and how they end."""

from types import SimpleNamespace

import numpy as np
import pytest

from quire.common.batch import Draw
from quire.common.outputs import RequestMetrics
from quire.common.params import SamplingParams
from quire.engine.requests.output import OutputBuilder, SampleOutput
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

"""What the executor receives of one sequence: tokens, drafts, and what its rows are for."""

import numpy as np
import pytest

from quire.common.batch import Ahead, Draw, PooledRows, PoolSpec, ScheduledSequence
from quire.common.params import SamplingParams
from quire.engine.requests.logprobs import PromptScores
from quire.engine.requests.output import SampleOutput
from quire.engine.requests.pooling import PromptPooling
from quire.engine.requests.sequence import Sequence
from quire.engine.scheduling.scheduled import scheduled_sequence

PLAIN = Draw(1.0, 0, 1.0, b"")
PENALIZED = Draw(1.0, 0, 1.0, b"", presence_penalty=0.5)
TABLES = (np.array([3, 4], np.int32), np.array([5, 6], np.int32))


class Grammar:
    """Allows these tokens in this order. Its mask is the number of tokens that it has seen."""

    error = None

    def __init__(self, *allowed: int, num_seen: int = 0) -> None:
        self.allowed, self.num_seen = allowed, num_seen

    def mask(self) -> np.ndarray:
        return np.array([self.num_seen], np.int32)

    def advance(self, token_id: int) -> bool:
        self.num_seen += 1
        return self.num_seen <= len(self.allowed) and self.allowed[self.num_seen - 1] == token_id

    def trial(self) -> "Grammar":
        return Grammar(*self.allowed, num_seen=self.num_seen)


def sequence(num_computed: int, *draws: Draw, grammar: Grammar | None = None, scores: PromptScores | None = None):
    """A sequence with the prompt 11 12 13 and the output 14 15."""
    seq = Sequence(7, [11, 12, 13], draws, SampleOutput(SamplingParams()), scores)
    seq.extend([14, 15])
    seq.num_computed_tokens, seq.grammar = num_computed, grammar
    return seq


def schedule(seq: Sequence, num_tokens: int, drafts: tuple[int, ...] = ()) -> ScheduledSequence:
    return scheduled_sequence(seq, num_tokens, drafts, TABLES)


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "token_ids", "is_last"),
    [
        (0, 3, (11, 12, 13), False),
        (1, 1, (12,), False),
        (2, 2, (13, 14), False),
        (3, 2, (14, 15), True),
        (4, 1, (15,), True),
        (0, 5, (11, 12, 13, 14, 15), True),
    ],
)
def test_tokens_are_drawn_only_from_the_last_row_of_all(num_computed, num_tokens, token_ids, is_last):
    seq = sequence(num_computed, PLAIN)
    scheduled = schedule(seq, num_tokens)
    assert (scheduled.seq_id, scheduled.start, scheduled.token_ids) == (7, num_computed, token_ids)
    assert scheduled.block_tables is TABLES
    assert scheduled.scored is None
    assert scheduled.drawn is (seq.drawn_rows if is_last else None)


def test_a_sequence_that_is_only_scored_draws_nothing():
    scores = PromptScores(2, [13, 14, 15], 4, None)
    seq = sequence(1, scores=scores)
    scheduled = schedule(seq, 4)
    assert scheduled.drawn is None
    assert scheduled.scored == scores.due(1, 5)
    assert (scheduled.scored.row, scheduled.scored.token_ids) == (0, (13, 14, 15))
    assert schedule(seq, 2).scored.token_ids == (13, 14)
    assert schedule(sequence(0, scores=scores), 1).scored is None


def test_drafts_come_behind_the_newest_token_with_a_row_for_each():
    scheduled = schedule(sequence(3, PLAIN), 2, (21, 22))
    assert (scheduled.start, scheduled.token_ids) == (3, (14, 15, 21, 22))
    drawn = scheduled.drawn
    assert (drawn.draws, drawn.num_prompt_tokens, drawn.num_rows) == ((PLAIN,), 3, 3)
    assert (drawn.history, drawn.masks) == (None, None)
    assert schedule(sequence(4, PLAIN), 1, (21,)).token_ids == (15, 21)


@pytest.mark.parametrize("drafts", [(), (21, 22)])
def test_where_a_draw_needs_the_history_it_includes_the_drafts(drafts):
    seq = sequence(4, PENALIZED)
    scheduled = schedule(seq, 1, drafts)
    drawn = scheduled.drawn
    assert scheduled.token_ids == (15, *drafts)
    assert (drawn.draws, drawn.num_prompt_tokens, drawn.num_rows) == ((PENALIZED,), 3, 1 + len(drafts))
    assert (drawn.history.tolist(), drawn.history.dtype) == ([11, 12, 13, 14, 15, *drafts], np.int32)
    assert drawn.masks is None
    assert schedule(sequence(3, PENALIZED), 1, ()).drawn is None, "nothing is drawn from a row before the last"


@pytest.mark.parametrize(
    ("drafts", "num_allowed"),
    [((), 0), ((21,), 1), ((21, 22), 2), ((21, 9, 23), 1), ((9, 22), 0), ((21, 22, 23, 9), 3)],
)
def test_drafts_end_before_the_first_that_the_grammar_forbids(drafts, num_allowed):
    grammar = Grammar(21, 22, 23)
    scheduled = schedule(sequence(4, PENALIZED, grammar=grammar), 1, drafts)
    allowed = drafts[:num_allowed]
    assert scheduled.token_ids == (15, *allowed)
    assert scheduled.drawn.num_rows == 1 + num_allowed
    assert [mask.tolist() for mask in scheduled.drawn.masks] == [[seen] for seen in range(num_allowed + 1)]
    assert scheduled.drawn.history.tolist() == [11, 12, 13, 14, 15, *allowed]
    assert grammar.num_seen == 0, "the sequence's own grammar advances when the tokens are accepted"


def test_a_grammar_alone_needs_no_history():
    scheduled = schedule(sequence(4, PLAIN, grammar=Grammar(21)), 1)
    assert scheduled.drawn.history is None
    assert [mask.tolist() for mask in scheduled.drawn.masks] == [[0]]
    assert scheduled.drawn.draws == (PLAIN,)


def pooled(num_computed: int, num_tokens: int, *, is_whole: bool = False) -> ScheduledSequence:
    """Of a prompt of five tokens, the second text of whose pair begins with the third."""
    seq = sequence(num_computed)
    seq.pooling = PromptPooling(PoolSpec("embed"), 5, is_whole=is_whole, token_type_ids=(0, 0, 1, 1, 1))
    return schedule(seq, num_tokens)


def test_a_prompt_is_pooled_in_the_step_of_its_last_token():
    assert pooled(0, 4).pooled is None
    assert pooled(4, 1).pooled == PooledRows(0, 1, PoolSpec("embed"))
    assert pooled(2, 3).pooled == PooledRows(2, 1, PoolSpec("embed"))
    assert pooled(0, 5, is_whole=True).pooled == PooledRows(0, 5, PoolSpec("embed"))
    assert schedule(sequence(0), 5).pooled is None


def test_the_tokens_of_a_step_come_with_their_own_types():
    assert pooled(1, 2).token_type_ids == (0, 1)
    assert pooled(3, 2).token_type_ids == (1, 1)
    assert schedule(sequence(0), 5).token_type_ids is None


def test_the_adapter_and_what_a_draft_model_does_are_passed_on():
    ahead = Ahead(num_drafts=2)
    scheduled = scheduled_sequence(sequence(0, PLAIN), 2, (), TABLES, 3, ahead)
    assert (scheduled.adapter, scheduled.ahead) == (3, ahead)
    plain = schedule(sequence(0, PLAIN), 2)
    assert (plain.adapter, plain.ahead) == (-1, None)

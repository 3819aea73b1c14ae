"""What a draft model is asked for, what it has drafted, and what that costs: without any model."""

from types import SimpleNamespace

import pytest

from quire.common.batch import Ahead, Correction, Drafted
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.model_drafts import ModelDrafts, ModelReading, best_rate, draft_odds
from quire.engine.drafting.row_times import RowTimes
from quire.engine.drafting.trust import SequenceDrafts, Trust
from tests.engine.fake import Harness

USUAL = 0.8


def model(num_drafts: int = 3, method: str = "draft_model") -> ModelDrafts:
    return ModelDrafts(SpeculativeConfig(method=method, model="m", num_speculative_tokens=num_drafts))


def sequence(num_tokens: int, num_computed: int):
    """Its token ids are their positions."""
    return SimpleNamespace(token_ids=list(range(num_tokens)), num_computed_tokens=num_computed, drafting=None)


def proposed(token_ids: list[int], num_tokens: int, most: int = 8) -> Draft:
    """Behind the first `num_tokens` tokens of the sequence, 21 22 23 have been drafted."""
    known = SequenceDrafts({}, reading=ModelReading(0, num_tokens, Drafted((21, 22, 23), (0.9, 0.8, 0.7))))
    return model().propose(None, SimpleNamespace(token_ids=token_ids, drafting=known), most)


def test_what_was_drafted_is_proposed_behind_the_tokens_that_it_foresaw() -> None:
    assert proposed([1, 2], 2) == Draft((21, 22, 23), (0.9, 0.8, 0.7))
    assert proposed([1, 2], 2, most=2) == Draft((21, 22), (0.9, 0.8))
    assert proposed([1, 2, 21], 2) == Draft((22, 23), (0.8, 0.7)), "a grammar has appended a token since"
    assert proposed([1, 2, 22], 2) == NO_DRAFT
    assert proposed([1, 2, 21, 22, 23], 2) == Draft((), ())
    assert proposed([1, 2, 21, 22, 23, 24], 2) == NO_DRAFT


def test_what_the_model_has_read_ends_before_the_token_that_was_drawn() -> None:
    reading, drafts = ModelReading(), model()
    assert reading.mean_odds == USUAL
    drafts.receive(reading, 5, Drafted((7, 8), (0.6, 0.2)))
    assert (reading.num_read, reading.num_tokens, reading.drafted.token_ids) == (5, 6, (7, 8))
    assert reading.mean_odds == pytest.approx(USUAL + 0.25 * (0.4 - USUAL))
    drafts.receive(reading, 6, Drafted())
    assert reading.mean_odds == pytest.approx(0.7), "nothing is learned where nothing was drafted"
    reading.forget()
    assert reading.mean_odds == pytest.approx(0.7 + 0.25 * (USUAL - 0.7))


def test_a_pass_is_timed_in_units_of_steps_and_an_accident_counts_little() -> None:
    drafts, rows = model(2), RowTimes()

    def pass_time() -> float:
        times = drafts.times(1, rows)
        assert times[0] == rows.shape(1)
        assert times[2] - rows.shape(3) == pytest.approx(2 * (times[1] - rows.shape(2)))
        return times[1] - rows.shape(2)

    assert pass_time() == 0
    drafts.observe(1.0, 0)
    rows.observe(1, 0.5)
    assert pass_time() == 0, "nothing is known of a pass"
    drafts.observe(1.0, 4)
    assert pass_time() == pytest.approx(0.5)
    rows.pace = 0.0
    assert pass_time() == 0, "nothing is known of a unit"
    rows.pace = 0.5
    drafts.observe(1.2, 4)
    assert pass_time() == pytest.approx(0.51)
    drafts.observe(99.0, 1)
    assert pass_time() == pytest.approx(0.51 + 0.1 * 0.51), "twice as long at most"
    assert drafts.times(4, rows)[1] == pytest.approx(rows.shape(8) + 1.1 * 0.51)
    assert len(drafts.times(4, rows)) == 3
    rows._shape, rows.pace = [100.0], 0.005
    assert drafts.times(1, rows) == pytest.approx([100.0, 102.0 + 56.1, 104.0 + 112.2]), "in whatever unit"


def test_it_reads_all_of_a_prompt_and_is_told_the_next_token_of_a_part() -> None:
    reading = ModelReading()
    assert model().ahead(sequence(10, 4), reading, 3, 0, (0.5,)) == Ahead(0, (), (0.5,), following=7)
    assert reading.num_read == 4, "what is cached has been read"
    assert model().ahead(sequence(10, 7), reading, 3, 3, ()) == Ahead(3, (4, 5, 6))
    reading.num_read = 9
    assert model().ahead(sequence(10, 7), reading, 3, 3, ()) == Ahead(3, ()), "computed again, so read again"
    assert reading.num_read == 7


def test_a_single_token_is_not_read_until_drafts_are_wanted() -> None:
    reading = ModelReading(4)
    assert model().ahead(sequence(6, 5), reading, 1, 0, ()) is None
    assert model().ahead(sequence(6, 4), reading, 2, 0, ()) == Ahead(0)
    assert model().ahead(sequence(6, 5), reading, 1, 1, ()) == Ahead(1, (4,))
    reading.num_read = 5
    assert model(method="eagle").ahead(sequence(6, 5), reading, 1, 0, ()) == Ahead(0), "a head reads at once"


@pytest.mark.parametrize(
    ("method", "num_unread", "reads"),
    [("draft_model", 64, True), ("draft_model", 65, False), ("eagle", 0, True), ("eagle", 1, False)],
)
def test_what_was_not_read_for_long_is_not_read_any_more(method, num_unread, reads) -> None:
    found = model(method=method).ahead(sequence(101, 100), ModelReading(100 - num_unread), 1, 3, ())
    assert (found is not None) is reads


def test_the_number_of_drafts_follows_their_cost() -> None:
    assert best_rate(0.9, [1.0, 1.01, 1.02, 1.03])[1] == 3
    assert best_rate(0.5, [1.0, 1.3, 1.6, 1.9]) == (pytest.approx(1.5 / 1.3), 1)
    assert best_rate(0.1, [1.0, 1.3, 1.6, 1.9]) == (1.0, 0)
    assert best_rate(0.5, [1.0, 1.5]) == (1.0, 0), "of equals the fewest"


def test_a_draft_is_worth_its_time_where_those_behind_it_cost_little() -> None:
    assert draft_odds(2.0, [1.0, 1.1, 1.2]) == pytest.approx((0.2, 0.2))
    assert draft_odds(2.0, [1.0, 1.3, 1.3, 1.1, 1.4]) == pytest.approx((0.2 / 3,) * 3 + (0.6,))
    assert draft_odds(1.0, [1.0, 0.9]) == (0.0,)
    assert draft_odds(2.0, [1.0, 1.1, 1.3, 1.6, 1.95]) == pytest.approx((0.2, 0.4, 0.6, 0.7)), "each costs more"


# What is planned


def ahead_of(
    drafting: Drafting,
    *,
    takes: bool = True,
    max_tokens: int = 50,
    num_drafts: int = 0,
    known: SequenceDrafts | None = None,
) -> Ahead:
    """Of a request whose prompt of five tokens runs in this step."""
    group = Harness(num_blocks=40).add([1] * 5, max_tokens)
    seq = group.seqs[0]
    seq.drafting = known
    planned = drafting.ahead([(group, seq, 5, num_drafts, takes)])
    assert not drafting.num_errors
    return planned[seq.seq_id]


def drafting_of(*, num_drafts: int = 4, is_adaptive: bool = True, max_model_len: int = 100) -> Drafting:
    config = SpeculativeConfig(
        method="draft_model", model="m", num_speculative_tokens=num_drafts, is_adaptive=is_adaptive
    )
    return Drafting([ModelDrafts(config)], config, max_model_len)


def known_of(*, mean_odds: float = USUAL) -> SequenceDrafts:
    return SequenceDrafts({"model": Trust()}, reading=ModelReading(mean_odds=mean_odds))


def test_without_adaptation_as_many_drafts_are_made_as_the_request_may_have() -> None:
    drafting = drafting_of(is_adaptive=False)
    assert ahead_of(drafting) == Ahead(4)
    assert ahead_of(drafting, takes=False) == Ahead(0)
    for max_tokens, num_drafts in ((6, 4), (5, 3), (3, 1), (2, 0), (1, 0)):
        assert ahead_of(drafting, max_tokens=max_tokens) == Ahead(num_drafts)
    assert ahead_of(drafting_of(is_adaptive=False, max_model_len=10)) == Ahead(3), "or as the context has"


def test_behind_drafts_of_the_step_there_are_as_many_as_fit_if_all_are_right() -> None:
    drafting = drafting_of(is_adaptive=False)
    assert ahead_of(drafting, num_drafts=3, max_tokens=50) == Ahead(4)
    assert ahead_of(drafting, num_drafts=3, max_tokens=7) == Ahead(2, num_more=2)
    assert ahead_of(drafting, num_drafts=3, max_tokens=5) == Ahead(0, num_more=3)


def test_where_drafts_are_not_worth_their_time_none_are_made_for_some_steps() -> None:
    drafting, reading = drafting_of(), known_of(mean_odds=0.0)
    assert ahead_of(drafting, known=reading) == Ahead(0)
    assert reading.reading.mean_odds == pytest.approx(0.25 * USUAL)
    while not ahead_of(drafting, known=reading).num_drafts:
        assert reading.reading.mean_odds < USUAL


def test_drafts_are_made_by_what_they_cost_each_with_the_odds_that_it_must_have() -> None:
    drafting, known = drafting_of(), known_of(mean_odds=0.7)
    drafting.model.times = lambda num_decodes, rows: [1.0 + 0.5 * count for count in range(5)]
    rate, best = best_rate(0.7, [1.0, 1.5, 2.0, 2.5, 3.0])
    assert best == 1
    found = ahead_of(drafting, known=known)
    assert (found.num_drafts, found.least_odds) == (3, pytest.approx((0.5 * rate,) * 4)), "surer ones may be more"
    assert known.reading.mean_odds == 0.7


def test_odds_are_corrected_by_how_often_drafts_were_right() -> None:
    drafting, known = drafting_of(), known_of()
    known.trust["model"].observe((0.5,) * 8, 8)
    assert ahead_of(drafting, known=known).correction == Correction(trust=pytest.approx((8 + 2) / (4 + 2)))
    drafting._calibrations["model"].observe((1.0,) * 8, 0)
    drafting._calibrations["model"].update()
    assert ahead_of(drafting, known=known_of()).correction.factor == pytest.approx((0 + 2) / (1 + 2))


def test_passes_are_shared_by_the_sequences_that_draft() -> None:
    drafting, asked = drafting_of(), []
    times = drafting.model.times
    drafting.model.times = lambda num_decodes, rows: asked.append(num_decodes) or times(num_decodes, rows)
    harness = Harness(num_blocks=40)
    groups = [harness.add([1] * 5, 9) for _ in range(3)]
    drafting.ahead(
        [(group, group.seqs[0], 5, 0, takes) for group, takes in zip(groups, (True, True, False), strict=True)]
    )
    assert asked == [2]

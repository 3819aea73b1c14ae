"""Which of several drafts is chosen, which sequences are searched, and what else is left unchanged."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from quire import EngineArgs
from quire.common.batch import Ahead, Drafted
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import Drafting, make_drafting
from quire.engine.drafting.forced import ForcedTokens
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.model_drafts import ModelDrafts
from quire.engine.drafting.trust import SequenceDrafts, Trust
from quire.engine.requests.sequence import SequenceGroup
from tests.engine.fake import Harness
from tests.speculation.test_drafting import Scripted, batch_of, drafting_of, propose, request
from tests.speculation.test_model_drafts import ahead_of, known_of
from tests.speculation.test_model_drafts import drafting_of as model_drafting


def known(group: SequenceGroup, drafting: Drafting) -> SequenceDrafts:
    """What is known of a request's drafts, from now on."""
    found = group.seqs[0].drafting = SequenceDrafts({name: Trust() for name in drafting.stats})
    return found


def flat(group: SequenceGroup, slope: float) -> tuple:
    """The arguments of `propose` for one sequence of a step of 9 tokens that takes `slope` longer with each draft."""
    return [(group, group.seqs[0])], 9, 9, lambda n: 1.0 + slope * (n - 9)


# Which draft


def test_of_equal_drafts_the_first_drafters_is_verified() -> None:
    drafting = drafting_of(Scripted("a", Draft((1,), (0.5,))), Scripted("b", Draft((2,), (0.5,))))
    group = request()
    assert propose(drafting, group) == [(1,)]
    assert group.seqs[0].drafting.drafter == "a"


def test_no_draft_is_better_than_certain_however_often_its_drafter_was_right() -> None:
    low, long = Scripted("low", Draft((1,), (0.9,))), Scripted("long", Draft((2, 3), (0.8, 0.5)))
    drafting, group = drafting_of(low, long), request()
    known(group, drafting).trust["low"].observe((0.5,) * 8, 8)
    assert propose(drafting, group) == [(2, 3)], "1.2 tokens are expected of it, and 1 of the other"


def test_an_unreliable_drafter_does_not_keep_the_next_from_being_asked() -> None:
    bad, good = Scripted("bad", Draft((1,), (1.0,))), Scripted("good", Draft((2,), (1.0,)))
    drafting, group = drafting_of(bad, good), request()
    for _ in range(8):
        drafting._calibrations["bad"].observe((1.0,), 0)
    assert drafting.propose(*flat(group, 0.3)) == [(2,)]
    assert (bad.num_calls, good.num_calls) == (0, 1)


def test_a_drafter_must_be_more_reliable_than_a_row_costs() -> None:
    drafter = Scripted("a", Draft((1,), (1.0,)))
    drafting = drafting_of(drafter)
    assert drafting.propose(*flat(request(), 1.0)) == [()]
    assert drafter.num_calls == 0, "a draft that is certain, and a row that costs as much as a step"


def test_where_no_draft_fits_no_drafter_is_asked() -> None:
    drafter = Scripted("a", Draft((1,), (1.0,)))
    drafting = drafting_of(drafter, is_adaptive=False)
    assert propose(drafting, Harness(num_blocks=40).add([1, 2, 3], 1)) == [()]
    assert drafter.num_calls == 0
    assert propose(drafting, Harness(num_blocks=40).add([1, 2, 3], 2)) == [(1,)]
    assert drafter.num_calls == 1


def test_a_step_verifies_no_more_drafts_than_it_may() -> None:
    drafting = drafting_of(Scripted("a", Draft((1, 2, 3), (1.0, 1.0, 1.0))))
    assert propose(drafting, request(), most=2) == [(1, 2)]
    assert not drafting.num_errors


def test_of_a_step_whose_time_is_unknown_no_draft_is_verified() -> None:
    drafter = Scripted("a", Draft((1,), (1.0,)))
    drafting, groups = drafting_of(drafter), [request(), request()]
    pairs = [(group, group.seqs[0]) for group in groups]
    for predict in (lambda n: 0.0, lambda n: float(n > 9)):
        assert drafting.propose(pairs, 9, 9, predict) == [(), ()]
    assert drafter.num_calls == 0
    assert not drafting.num_errors


def test_what_was_learned_of_a_sequence_counts_less_after_each_search() -> None:
    drafting, group = drafting_of(Scripted("a", NO_DRAFT)), request()
    trust = known(group, drafting).trust["a"]
    trust.accepted = trust.expected = 8.0
    propose(drafting, group)
    assert (trust.accepted, trust.expected) == pytest.approx((8 * 0.98, 8 * 0.98))


# Which sequences


@pytest.mark.parametrize(
    ("drafters", "has_grammar", "pauses"),
    [
        ([Scripted("a", NO_DRAFT)], False, True),
        ([Scripted("a", NO_DRAFT)], True, True),
        ([ForcedTokens()], False, True),
        ([ForcedTokens()], True, False),
        ([ModelDrafts(SpeculativeConfig("draft_model", model="m"))], False, False),
    ],
)
def test_a_pause_ends_searches_that_may_find_nothing(drafters: list, has_grammar: bool, pauses: bool) -> None:
    """A draft model does not draft without reason, and a grammar forces tokens now and then."""
    drafting = drafting_of(*drafters)
    seq = SimpleNamespace(grammar=object() if has_grammar else None, drafting=SequenceDrafts({}, pause=2))
    assert [drafting._pauses(seq) for _ in range(3)] == [pauses, pauses, False]
    assert seq.drafting.pause == (0 if pauses else 2)


def test_a_right_draft_after_wrong_ones_makes_the_next_pause_a_short_one() -> None:
    drafting, group = drafting_of(Scripted("a", Draft((1,), (1.0,)))), request()
    propose(drafting, group)
    seq, pauses = group.seqs[0], []
    for accepted in (0, 0, 0, 1, 0, 0):
        drafting.observe(group, seq, 1, accepted)
        pauses.append(seq.drafting.pause)
        seq.drafting.pause = 0
    assert pauses == [0, 1, 3, 0, 0, 1]
    assert not drafting.num_errors


def test_a_search_costs_the_time_between_two_looks_at_the_clock() -> None:
    times = iter([1.0, 1.005])
    drafting = Drafting([Scripted("a", NO_DRAFT)], SpeculativeConfig("ngram"), 100, clock=lambda: next(times))
    drafting.observe_step(batch_of((1, 1)), 1.0)
    propose(drafting, request())
    assert drafting.may_search, "of a hundredth of the step, half was spent"


def test_steps_that_read_prompts_do_not_time_rows() -> None:
    drafting = drafting_of()
    for shape in ((4, 1), (4, 0)):
        for _ in range(2):
            drafting.observe_step(batch_of(shape), 1.0)
    assert drafting.row_times.pace == 0
    assert not drafting.num_errors


def test_each_drafter_learns_which_sequence_of_which_request_has_ended() -> None:
    ended = []
    drafter = SimpleNamespace(name="a", finish=lambda *given: ended.append(given))
    group = request()
    drafting_of(drafter).finish(group, group.seqs[0])
    assert ended == [(group, group.seqs[0])]


# A draft model


def test_what_a_draft_model_has_read_and_drafted_is_kept_for_its_sequence() -> None:
    drafting, group = model_drafting(), request()
    drafting.receive(group.seqs[0], 5, Drafted((7, 8), (0.6, 0.2)))
    reading = group.seqs[0].drafting.reading
    assert (reading.num_read, reading.num_tokens, reading.drafted) == (5, 6, Drafted((7, 8), (0.6, 0.2)))


def test_it_waits_where_one_token_runs_and_no_draft_is_wanted() -> None:
    drafting, group = model_drafting(), request()
    seq = group.seqs[0]
    seq.num_computed_tokens = 2
    assert drafting.ahead([(group, seq, 1, 0, False)]) == {}
    assert not drafting.num_errors


def test_certain_drafts_are_the_surest_there_are() -> None:
    drafting, known_of_it = model_drafting(), known_of()
    drafting.model.times = lambda num_decodes, rows: [1.0 + 1.05 * count for count in range(5)]
    known_of_it.trust["model"].observe((0.5,) * 8, 8)
    assert ahead_of(drafting, known=known_of_it).num_drafts == 0, "each costs more than a token's time"


def test_twice_the_best_number_may_be_drafted_and_one_more() -> None:
    drafting, known_of_it = model_drafting(num_drafts=6), known_of(mean_odds=0.7)
    drafting.model.times = lambda num_decodes, rows: [1.0, 1.3, 1.6, 9.0, 9.0, 9.0, 9.0]
    assert ahead_of(drafting, known=known_of_it).num_drafts == 5


def test_its_failures_are_counted_under_its_name() -> None:
    drafting = drafting_of(Scripted("a", NO_DRAFT))
    assert drafting.ahead([]) == {}
    assert drafting.num_errors == {"model": 1}
    assert ahead_of(model_drafting(is_adaptive=False)) == Ahead(4)


# An engine's


def test_an_engine_that_draws_no_tokens_or_has_no_method_has_no_drafts() -> None:
    config = EngineArgs().resolve()
    pools = dataclasses.replace(config, model=dataclasses.replace(config.model, runner="pooling"))
    off = EngineArgs(speculative_config={"method": "off"}).resolve()
    assert [make_drafting(each) for each in (pools, off)] == [None, None]
    drafting = make_drafting(config)
    assert drafting is not None
    assert list(drafting.stats) == ["prediction", "forced", "own", "recent"]


def test_an_engines_drafts_end_with_its_context() -> None:
    method = {"method": "ngram", "adaptive": False}
    drafting = make_drafting(EngineArgs(max_model_len=20, speculative_config=method).resolve())
    assert drafting is not None
    group = Harness(num_blocks=40).add([1, 2, 3, 4, 5] * 3, 50)
    assert propose(drafting, group) == [(1, 2, 3, 4)]

"""Which drafts are verified, what is learned of them, and what a failure costs."""

import itertools
import logging
from types import SimpleNamespace

import pytest

from quire.common.batch import Draw, DrawnRows
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting import drafting as drafting_module
from quire.engine.drafting.drafting import OTHER_TENANTS, Drafting
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.model_drafts import ModelDrafts
from quire.engine.drafting.search_time import SHORTEST_STEP_S
from quire.engine.requests.sequence import SequenceGroup
from tests.engine.fake import FunctionDrafter, Harness, expected_output


@pytest.fixture
def _searching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are short where they are short in engines, which search for no drafts in tests."""
    monkeypatch.setattr(drafting_module, "SHORTEST_STEP_S", SHORTEST_STEP_S)


class Scripted:
    """Proposes the same draft again and again."""

    def __init__(self, name: str, draft: Draft) -> None:
        self.name, self.draft, self.num_calls = name, draft, 0

    def propose(self, group, seq, most: int) -> Draft:
        self.num_calls += 1
        return self.draft.first(most)

    def finish(self, group, seq) -> None:
        raise RuntimeError("planted")


def drafting_of(*drafters, **fields: object) -> Drafting:
    return Drafting(drafters, SpeculativeConfig(**fields), 100)


def request() -> SequenceGroup:
    return Harness(num_blocks=40).add([1, 2, 3], 50)


def propose(drafting: Drafting, *groups: SequenceGroup, most: int = 99, num_tokens: int | None = None):
    pairs = [(group, group.seqs[0]) for group in groups]
    return drafting.propose(pairs, num_tokens or len(groups), most, lambda n: 0.0)


def test_of_several_drafts_the_one_that_promises_most_is_verified() -> None:
    low, high = Scripted("low", Draft((1, 2, 3), (0.3,) * 3)), Scripted("high", Draft((4, 5), (0.9, 0.9)))
    drafting, group = drafting_of(low, high), request()
    assert propose(drafting, group) == [(4, 5)]
    num_wrong = 0
    while propose(drafting, group)[0][0] == 4:
        drafting.observe(group, group.seqs[0], 2, 0)
        group.seqs[0].drafting.pause = 0
        num_wrong += 1
    assert 1 < num_wrong < 6, "then the other one is not as reliable as it says"
    counts = drafting.stats["high"]
    assert (counts.num_drafts, counts.num_tokens, counts.num_accepted) == (num_wrong, 2 * num_wrong, 0)
    drafting.observe(group, group.seqs[0], 3, 2)
    assert drafting.stats["low"].num_accepted_at[:3] == [1, 1, 0]
    assert drafting.stats["high"].copy() == counts


def test_drafts_are_counted_for_a_bounded_number_of_tenants() -> None:
    drafting, group = drafting_of(Scripted("one", Draft((1, 2), (0.9, 0.9)))), request()
    propose(drafting, group)
    for number in range(70):
        group.tenant = f"tenant {number}"
        drafting.observe(group, group.seqs[0], 2, 1)
    group.tenant = "tenant 3"
    drafting.observe(group, group.seqs[0], 2, 2)
    counts = {name: (of.num_tokens, of.num_accepted) for name, of in drafting.tenant_stats.items()}
    assert len(counts) == 65
    assert (counts["tenant 3"], counts["tenant 63"], counts[OTHER_TENANTS]) == ((4, 3), (2, 1), (12, 6))


def test_what_was_learned_of_one_request_is_expected_of_the_next_and_forgotten_in_time() -> None:
    drafter = Scripted("a", Draft((1,) * 8, (0.9,) * 8))
    drafting = drafting_of(drafter)
    for _ in range(100):
        group = request()
        propose(drafting, group)
        if group.seqs[0].drafting.odds:
            drafting.observe(group, group.seqs[0], 8, 0)
    assert propose(drafting, request()) == [()]
    for _ in range(4000):
        (token_ids,) = propose(drafting, request())
        if token_ids:
            break
    assert token_ids, "it is tried again"


def test_wrong_drafts_make_a_sequence_pause_longer_and_a_right_one_ends_that() -> None:
    drafter = Scripted("a", Draft((1,), (1.0,)))
    drafting, group = drafting_of(drafter), request()
    pauses = []
    for _ in range(7):
        propose(drafting, group)
        drafting.observe(group, group.seqs[0], 1, 0)
        pauses.append(group.seqs[0].drafting.pause)
        group.seqs[0].drafting.pause = 0
    assert pauses == [0, 1, 3, 7, 15, 16, 16]
    drafting.observe(group, group.seqs[0], 1, 1)
    drafting.observe(group, group.seqs[0], 1, 0)
    assert group.seqs[0].drafting.pause == 0


@pytest.mark.parametrize(("search_s", "num_searches"), [(0.049, 50), (0.051, 13)])
def test_searches_that_find_nothing_become_rare_where_they_take_long(search_s: float, num_searches: int) -> None:
    drafter, clock = Scripted("a", NO_DRAFT), itertools.cycle([0.0, search_s])
    drafting, group = Drafting([drafter], SpeculativeConfig(), 100, clock.__next__), request()
    drafting.observe_step(batch_of((1, 1)), 1.0)
    for _ in range(50):
        assert propose(drafting, group) == [()]
    assert drafter.num_calls == num_searches


def test_without_adaptation_every_draft_is_verified_in_every_step() -> None:
    drafter = Scripted("a", Draft((1, 2, 3), (0.01,) * 3))
    drafting, groups = drafting_of(drafter, is_adaptive=False, num_speculative_tokens=2), [request(), request()]
    for _ in range(20):
        assert propose(drafting, *groups) == [(1, 2), (1, 2)]
        drafting.observe(groups[0], groups[0].seqs[0], 2, 0)
    assert propose(drafting, *groups, most=3) == [(1, 2), (1,)]


def test_a_step_with_prompts_is_timed_as_such() -> None:
    drafting, group = drafting_of(Scripted("a", Draft((1,), (0.5,)))), request()
    assert propose(drafting, group, num_tokens=9) == [()], "before the first step nothing is known"
    pairs = [(group, group.seqs[0])]
    assert drafting.propose(pairs, 9, 9, lambda n: 1.0 + n) == [(1,)]
    assert drafting.propose(pairs, 10, 9, lambda n: 1.0 + n) == [(1,)], "it is not recorded, so it may have eleven rows"
    group.seqs[0].drafting = None
    assert drafting.propose(pairs, 9, 9, lambda n: 1.0 if n == 9 else 2.0) == [()]


def batch_of(*sequences: tuple[int, int]):
    """Sequences of these numbers of tokens and drawn rows."""
    made = [
        SimpleNamespace(token_ids=(0,) * tokens, drawn=DrawnRows((Draw(0.0, 0, 1.0, b""),), 1, rows) if rows else None)
        for tokens, rows in sequences
    ]
    return SimpleNamespace(sequences=made, num_tokens=sum(tokens for tokens, _ in sequences))


def test_rows_are_timed_by_steps_of_decodes_after_the_first_of_each_shape() -> None:
    drafting = drafting_of()
    prior = drafting.row_times.shape(4)
    for shape in ([(2, 2), (2, 2)], [(4, 1)], [(4, 0)], [(1, 1), (3, 2)], [(5, 1)], [(1, 1)]):
        drafting.observe_step(batch_of(*shape), 1.0)
    assert drafting.row_times.shape(4) == prior
    for _ in range(8):
        drafting.observe_step(batch_of((1, 1)), 1.0)
    for _ in range(40):
        drafting.observe_step(batch_of((2, 2), (2, 2)), 3.0)
        drafting.observe_step(batch_of((1, 1)), 1.0)
    assert drafting.row_times.shape(4) / drafting.row_times.shape(1) == pytest.approx(3.0, rel=0.05)


@pytest.mark.usefixtures("_searching")
def test_the_second_step_with_a_number_of_rows_says_how_long_they_take_whichever_sequences_have_them() -> None:
    drafting, rows = drafting_of(), []
    drafting.row_times.observe = lambda *arguments: rows.append(arguments)
    for shape in ([(2, 2), (2, 2)], [(4, 4)], [(1, 1)] * 4, [(3, 3)]):
        drafting.observe_step(batch_of(*shape), 1.0)
    assert rows == [(4, 1.0)] * 2


@pytest.mark.usefixtures("_searching")
def test_of_equal_short_steps_one_in_eight_is_looked_at_and_counts_for_all() -> None:
    drafting, rows, steps = drafting_of(), [], []
    drafting.row_times.observe = lambda *arguments: rows.append(arguments)
    drafting._search_time.observe_steps = lambda *arguments: steps.append(arguments)
    batch = batch_of((1, 1), (2, 2))
    for _ in range(1 + 16):
        drafting.observe_step(batch, 1e-3)
    assert steps == [(1e-3, 1, 2), (1e-3, 8, 2), (1e-3, 8, 2)]
    assert rows == [(3, 1e-3)] * 2
    drafting.observe_step(batch_of((1, 1)), 1e-3)
    assert steps[3:] == [(1e-3, 1, 1)], "another shape is looked at"
    for _ in range(2):
        drafting.observe_step(batch_of((1, 1)), 4e-3)
    assert steps[4:] == [(4e-3, 1, 1)] * 2, "so are long steps"
    assert rows[2:] == [(1, 4e-3)] * 2


@pytest.mark.usefixtures("_searching")
def test_a_draft_model_is_timed_by_the_steps_that_time_rows() -> None:
    config, seen = SpeculativeConfig(method="draft_model", model="m"), []
    drafting = Drafting([ModelDrafts(config)], config, 100)
    drafting.model.observe = lambda *arguments: seen.append(arguments)
    for shape in ((1, 1), (1, 1), (9, 1)):
        drafting.observe_step(batch_of(shape), 1.0, 0.25, 3)
    assert seen == [(0.25, 3)]
    drafting.observe_step(batch_of((1, 1)), 1.0)
    assert seen[1:] == [(0.0, 0)]


# Searches


@pytest.mark.usefixtures("_searching")
@pytest.mark.parametrize(
    ("fields", "at_once"), [({}, False), ({"method": "ngram"}, True), ({"is_adaptive": False}, True)]
)
def test_the_automatic_choice_does_not_search_while_steps_are_short(fields, at_once: bool) -> None:
    drafting = drafting_of(**fields)
    assert drafting.may_search is at_once
    drafting.observe_step(batch_of((1, 1)), 3e-3)
    assert drafting.may_search is at_once
    drafting.observe_step(batch_of((1, 1)), 5e-3)
    assert drafting.may_search


@pytest.mark.usefixtures("_searching")
@pytest.mark.parametrize("is_adaptive", [True, False])
def test_searches_take_the_time_that_the_clock_shows(is_adaptive: bool) -> None:
    times = iter([1.0, 1.5])
    config = SpeculativeConfig(is_adaptive=is_adaptive)
    drafting = Drafting([Scripted("a", NO_DRAFT)], config, 100, clock=lambda: next(times, 1.5))
    drafting.observe_step(batch_of((1, 1)), 1.0)
    propose(drafting, request())
    assert drafting.may_search is not is_adaptive


@pytest.mark.usefixtures("_searching")
def test_accepted_drafts_pay_for_searches() -> None:
    drafting, group = drafting_of(Scripted("a", Draft((1, 2), (0.9, 0.9)))), request()
    drafting.observe_step(batch_of((1, 1)), 1.0)
    propose(drafting, group)
    drafting._search_time.spend(0.9, 1)
    drafting.observe(group, group.seqs[0], 2, 1)
    assert not drafting.may_search
    drafting.observe(group, group.seqs[0], 2, 1)
    assert drafting.may_search


def test_a_draft_ends_one_token_before_the_request_does() -> None:
    """The last token is drawn behind it."""
    drafting = Drafting([Scripted("a", Draft((1,) * 9, (1.0,) * 9))], SpeculativeConfig(is_adaptive=False), 20)
    for max_tokens, most in ((9, 8), (4, 3), (2, 1), (1, 0), (None, 8)):
        group = Harness(num_blocks=40).add([1, 2, 3], max_tokens)
        assert propose(drafting, group) == [(1,) * most]
    long = Harness(num_blocks=40).add([1] * 15, 50)
    assert propose(drafting, long) == [(1,) * 4], "nor beyond the context"


def test_a_draft_ends_where_the_grammar_forbids_it() -> None:
    drafting, group = drafting_of(Scripted("a", Draft((1, 2, 3), (0.9,) * 3)), is_adaptive=False), request()
    group.seqs[0].grammar = SimpleNamespace(num_allowed=lambda token_ids: len(token_ids) - 1)
    assert propose(drafting, group) == [(1, 2)]


def test_a_drafter_that_would_have_to_be_more_reliable_than_it_is_is_not_asked() -> None:
    drafter = Scripted("a", Draft((1,), (1.0,)))
    drafting, group = drafting_of(drafter), request()
    for _ in range(4):
        drafting._calibrations["a"].observe((1.0,), 0)
    pairs = [(group, group.seqs[0])]
    assert drafting.propose(pairs, 9, 9, lambda n: 1.0 + 0.3 * (n - 9)) == [()]
    assert drafter.num_calls == 0, "a row takes 0.3 of a step, and a sixth of the drafts are right"
    assert drafting.propose(pairs, 9, 9, lambda n: 1.0 + 0.1 * (n - 9)) == [(1,)]


# Failures


def failing(group, seq):
    raise RuntimeError("planted")


def test_a_drafter_that_raises_loses_its_drafts_and_is_logged_once(caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    bad = FunctionDrafter(failing)
    drafting, group = drafting_of(bad, Scripted("good", Draft((1,), (0.9,))), is_adaptive=False), request()
    for _ in range(3):
        assert propose(drafting, group) == [(1,)]
    assert drafting.num_errors == {"function": 3}
    drafting.finish(group, group.seqs[0])
    assert drafting.num_errors == {"function": 3, "good": 1}
    assert [r.getMessage() for r in caplog.records] == [
        "drafting failed (function): drafts are lost, and no token",
        "drafting failed (good): drafts are lost, and no token",
    ]


def test_a_drafter_that_raises_changes_no_output() -> None:
    harness = Harness(num_blocks=20, draft=failing)
    groups = [harness.add([token_id] * 6, 12) for token_id in (1, 2)]
    harness.run()
    for group in groups:
        assert harness.output(group) == expected_output(group.outputs.prompt_token_ids, 12)
        assert group.error is None


@pytest.mark.parametrize("place", ["_choose", "stats"])
def test_a_fault_in_what_chooses_drafts_changes_no_output(place: str) -> None:
    harness = Harness(num_blocks=20, draft=lambda group, seq: [1, 2])
    drafting = harness.scheduler.drafting
    setattr(drafting, place, None)
    group = harness.add([1] * 6, 12)
    harness.run()
    harness.check_output(group)
    assert drafting.num_errors[""] > 0


def test_an_interrupt_is_not_contained() -> None:
    def interrupted(group, seq):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        propose(drafting_of(FunctionDrafter(interrupted)), request())


def test_of_a_sequence_without_drafts_nothing_is_learned() -> None:
    drafting, group = drafting_of(Scripted("a", NO_DRAFT)), request()
    drafting.observe(group, group.seqs[0], 2, 1)
    assert drafting.stats["a"].num_drafts == 0
    assert not drafting.num_errors

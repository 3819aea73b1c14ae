"""Where drafts come from, and whose tokens they may come from."""

import numpy as np
import pytest

from quire.config.speculative import METHODS, SpeculativeConfig
from quire.engine.drafting.drafters import OthersTokens, OwnTokens, Predicted, make_drafters
from quire.engine.drafting.forced import ForcedTokens
from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.drafting.trust import SequenceDrafts
from quire.engine.requests.sequence import SequenceGroup
from quire.kv.prefix_cache.content_hash import ContentKey
from tests.engine.fake import Harness

CONFIG = SpeculativeConfig()


def request(prompt: list[int], output: list[int], tenant: str = "", salt: str = "") -> SequenceGroup:
    group = Harness(num_blocks=40).add(prompt, 50, ContentKey(cache_salt=salt), tenant=tenant)
    group.seqs[0].extend(output)
    return group


def proposed(drafter, group: SequenceGroup, most: int = 8) -> list[int]:
    return list(drafter.propose(group, group.seqs[0], most).token_ids)


def test_each_method_has_its_drafters() -> None:
    names = {method: [d.name for d in make_drafters(SpeculativeConfig(method))] for method in METHODS}
    assert names == {method: list(sources) for method, sources in METHODS.items()}


def test_own_tokens_are_those_of_prompt_and_output() -> None:
    group = request([1, 2, 3, 4, 5], [9, 2, 3])
    assert proposed(OwnTokens(CONFIG), group, 3) == [4, 5, 9]
    assert proposed(OwnTokens(SpeculativeConfig(min_match=3)), group, 3) == []
    group.seqs[0].extend([4])
    assert proposed(OwnTokens(SpeculativeConfig(min_match=3)), group, 3) == [5, 9, 2]


def test_others_tokens_are_those_of_the_same_tenant_and_content_key() -> None:
    drafter = OthersTokens(CONFIG)
    first = request([1, 2, 3], [4, 5, 6, 7], "t", "s")
    drafter.finish(first, first.seqs[0])
    same = request([8, 8], [4, 5], "t", "s")
    assert proposed(drafter, same) == [6, 7]
    for tenant, salt in (("u", "s"), ("t", ""), ("", "s"), ("t", "other")):
        assert proposed(drafter, request([8, 8], [4, 5], tenant, salt)) == []


def test_an_output_is_found_by_the_end_of_its_prompt() -> None:
    drafter = OthersTokens(CONFIG)
    first = request(list(range(30)), [40, 41])
    drafter.finish(first, first.seqs[0])
    assert proposed(drafter, request(list(range(20, 30)), [])) == [40, 41]
    assert proposed(drafter, request([12, 13], [])) == [], "of a prompt only the end is kept"
    short = request([50, 51], [60, 61])
    drafter.finish(short, short.seqs[0])
    assert proposed(drafter, request([50, 51], [])) == [60, 61], "of a short prompt all is kept"


def test_an_output_of_one_token_is_not_kept() -> None:
    drafter = OthersTokens(CONFIG)
    first = request([1, 2, 3], [4])
    drafter.finish(first, first.seqs[0])
    assert proposed(drafter, request([2, 3], [])) == []


def test_what_is_predicted_is_proposed_from_its_beginning_on_and_again_behind_a_change() -> None:
    drafter = Predicted(CONFIG)
    group = request([1, 2], [])
    assert drafter.propose(group, group.seqs[0], 8) == NO_DRAFT
    group.prediction = np.array([5, 6, 7, 8, 9, 5, 6, 10], np.int32)
    assert drafter.propose(group, group.seqs[0], 3) == Draft((5, 6, 7), (0.9,) * 3)
    group.seqs[0].extend([5, 6, 7])
    assert proposed(drafter, group, 3) == [8, 9, 5]
    group.seqs[0].extend([30, 31])
    assert proposed(drafter, group) == []
    group.seqs[0].extend([9])
    assert proposed(drafter, group) == [5, 6, 10]
    group.seqs[0].extend([5, 6, 10])
    assert proposed(drafter, group) == []


def test_a_prediction_that_is_over_proposes_nothing_but_what_it_repeats() -> None:
    group = request([1, 2], [5, 6])
    group.prediction = np.array([5, 6], np.int32)
    assert proposed(Predicted(CONFIG), group) == []
    group.seqs[0].extend([5])
    assert proposed(Predicted(CONFIG), group) == [6]
    repeated = request([1, 2], [5, 6, 5, 6])
    repeated.prediction = np.array([5, 6, 5, 6], np.int32)
    assert proposed(Predicted(CONFIG), repeated) == [5, 6]


TEXT = list(range(10, 40))


def test_a_text_that_repeats_itself_is_followed_where_it_was() -> None:
    """Elsewhere more agrees: what comes before the next changed token."""
    line = list(range(10, 17))
    expected = line * 8
    prediction = [0 if i % 20 == 10 else token_id for i, token_id in enumerate(expected)]
    group = request([1, 2], [])
    group.prediction = np.array(prediction, np.int32)
    group.seqs[0].drafting = SequenceDrafts({})
    drafter, num_steps = Predicted(CONFIG), 0
    while (done := group.seqs[0].num_output_tokens) < len(expected):
        drafts = proposed(drafter, group)
        wrong = (i for i, token_id in enumerate(drafts) if expected[done + i : done + i + 1] != [token_id])
        num_right = next(wrong, len(drafts))
        group.seqs[0].extend(expected[done : done + num_right + 1])
        num_steps += 1
    assert num_steps == 9  # three for each change but the last


def test_behind_two_changes_the_place_is_looked_for_again() -> None:
    group = request([1, 2], TEXT[:8])
    group.prediction = np.array(TEXT, np.int32)
    group.seqs[0].drafting = SequenceDrafts({})
    drafter = Predicted(CONFIG)
    assert proposed(drafter, group, 3) == TEXT[8:11]
    group.seqs[0].extend([99])
    assert proposed(drafter, group, 3) == TEXT[9:12], "changed"
    group.seqs[0].extend([TEXT[8]])
    assert proposed(drafter, group, 3) == TEXT[9:12], "no: inserted"
    group.seqs[0].extend(TEXT[9:])
    assert proposed(drafter, group, 3) == []
    group.seqs[0].extend([99, 98, *TEXT[:2]])
    assert proposed(drafter, group, 3) == TEXT[2:5], "from its beginning again"


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ([99], TEXT[1:4]),
        ([*TEXT[:8], 99], TEXT[9:12]),
        ([*TEXT[:8], 99, TEXT[9]], TEXT[10:13]),
        ([*TEXT[:8], 99, 98], []),
        ([*TEXT[:8], 99, 98, TEXT[10]], TEXT[11:14]),
        ([*TEXT[:8], 99, TEXT[8]], TEXT[9:12]),
        ([*TEXT[:8], TEXT[9], TEXT[10]], TEXT[11:14]),
        ([*TEXT[:8], TEXT[20]], TEXT[9:12]),
        ([*TEXT[:8], TEXT[20], TEXT[21]], TEXT[22:25]),
        ([50, 51, 52], []),
    ],
    ids=[
        "the first token changed", "one changed", "and the next as predicted", "two changed", "and the next as well",
        "one inserted", "one left out", "changed into one that occurs later", "many left out", "nothing in common",
    ],
)  # fmt: skip
def test_behind_a_change_the_prediction_goes_on_where_it_agrees_best(output: list[int], expected: list[int]) -> None:
    group = request([1, 2], output)
    group.prediction = np.array(TEXT, np.int32)
    assert proposed(Predicted(CONFIG), group, 3) == expected


def test_of_places_that_agree_as_well_the_next_to_the_number_of_tokens_is_taken() -> None:
    line = [7, 8, *range(100, 120)]
    group = request([1, 2], [50, *line, 51, *line])
    group.prediction = np.array([*line, 60, *line, 61, *line, 62], np.int32)
    (token_id,) = proposed(Predicted(CONFIG), group, 1)
    assert token_id == 61


def test_a_change_is_less_sure_to_be_one_of_as_many_tokens_than_what_follows_an_agreement() -> None:
    group = request([1, 2], [*TEXT[:8], 99])
    group.prediction = np.array(TEXT, np.int32)
    odds = Predicted(CONFIG).propose(group, group.seqs[0], 3).odds
    assert odds == pytest.approx((0.54, 0.9, 0.9), abs=0.001)


@pytest.mark.parametrize("kind", [OwnTokens, Predicted])
def test_nothing_is_kept_of_a_request_that_has_ended(kind) -> None:
    group, drafter = request([1, 2, 3], [4, 5]), kind(CONFIG)
    before = dict(vars(drafter))
    drafter.finish(group, group.seqs[0])
    assert vars(drafter) == before


class Constant:
    """A grammar of one text, and its own trial."""

    def __init__(self, token_ids: list[int]) -> None:
        self.left, self.num_advanced = token_ids, 0

    @property
    def is_finished(self) -> bool:
        return not self.left

    def trial(self) -> "Constant":
        return self

    def forced_tokens(self, *, always: bool) -> list[int]:
        return self.left

    def advance(self, token_id: int) -> bool:
        assert token_id == self.left[0]
        self.left, self.num_advanced = self.left[1:], self.num_advanced + 1
        return True


def test_of_a_long_forced_text_only_what_may_be_drafted_is_tried() -> None:
    """Else each of the steps of a constant would take the time of all that is left of it."""
    group = request([1, 2], [])
    group.seqs[0].drafting, grammar = SequenceDrafts({}), Constant(list(range(50)))
    group.seqs[0].grammar = grammar
    assert proposed(ForcedTokens(), group, 4) == [0, 1, 2, 3]
    assert grammar.num_advanced == 4

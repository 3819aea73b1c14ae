"""Where drafts come from, and whose tokens they may come from."""

import numpy as np
import pytest

from quire.config.speculative import METHODS, SpeculativeConfig
from quire.engine.drafting.drafters import OthersTokens, OwnTokens, Predicted, make_drafters
from quire.engine.drafting.lookup import NO_DRAFT, Draft
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


@pytest.mark.parametrize("kind", [OwnTokens, Predicted])
def test_nothing_is_kept_of_a_request_that_has_ended(kind) -> None:
    group, drafter = request([1, 2, 3], [4, 5]), kind(CONFIG)
    before = dict(vars(drafter))
    drafter.finish(group, group.seqs[0])
    assert vars(drafter) == before

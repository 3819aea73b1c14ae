"""What followed the newest tokens earlier."""

import random

import numpy as np
import pytest

from quire.engine.drafting.lookup import END, NO_DRAFT, Draft, look_up
from quire.engine.drafting.recent import RecentOutputs


def found(text: list[int], newest: list[int] | None = None, num_tokens: int = 8, low: int = 2, high: int = 16) -> Draft:
    """By default the text ends with the newest tokens."""
    array = np.array(text, np.int32)
    given = array if newest is None else np.array(newest, np.int32)
    return look_up(array, given, num_tokens, min_match=low, max_match=high)


def plain_look_up(text: list[int], newest: list[int], num_tokens: int, low: int, high: int) -> Draft:
    """The same by its definition."""
    for length in range(min(high, len(newest)), low - 1, -1):
        places = [i for i in range(length, len(text)) if text[i - length : i] == newest[-length:]]
        if not places:
            continue
        tokens, odds = [], []
        while len(tokens) < num_tokens and (places := [p for p in places if p < len(text)]):
            following = [text[p] for p in places]
            counts = {t: following.count(t) for t in following if t != END}
            if not counts:
                break
            best = max(counts, key=lambda t: (counts[t], max(i for i, f in enumerate(following) if f == t)))
            tokens.append(best)
            odds.append(length / (length + 1) * counts[best] / len(places))
            places = [p + 1 for p in places if text[p] == best]
        return Draft(tuple(tokens), tuple(odds))
    return NO_DRAFT


def test_the_continuation_of_the_longest_match_is_proposed() -> None:
    draft = found([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], num_tokens=3)
    assert draft.token_ids == (4, 9, 2)
    assert draft.odds == (0.75,) * 3
    assert found([1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], num_tokens=3, high=2).token_ids == (7, 1, 2), "the latest of two"


def test_the_most_frequent_continuation_is_followed_as_far_as_it_goes() -> None:
    draft = found([1, 2, 5, 6, 9, 1, 2, 5, 7, 0, 1, 2, 8, 3, 1, 2])
    assert draft.token_ids[:3] == (5, 7, 0)
    assert draft.odds[:2] == pytest.approx((2 / 3 * 2 / 3, 2 / 3 / 2))


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3, 4], [1, 2, 3, 2]])
def test_without_a_match_there_is_no_draft(text: list[int]) -> None:
    assert found(text) == NO_DRAFT


def test_the_shortest_text_with_a_match_has_two_tokens() -> None:
    assert found([1, 5], [1], low=1) == Draft((5,), (0.5,))
    assert found([1], [1], low=1) == NO_DRAFT
    assert found([1, 1, 5], [1, 1]) == Draft((5,), (2 / 3,))


def test_only_the_latest_places_are_followed() -> None:
    """Of 70 places where a text went on, the first six went on otherwise."""
    text = [t for place in range(70) for t in (1, 2, 5 if place < 6 else 6, 9)]
    assert found(text, [1, 2], 1).odds == (2 / 3,)


def test_what_follows_goes_on_into_the_newest_tokens_themselves() -> None:
    assert found([7] * 5, num_tokens=6).token_ids == (7,)
    assert found([1, 2, 1, 2, 1, 2], num_tokens=6).token_ids == (1, 2)


def test_nothing_is_proposed_from_behind_an_end() -> None:
    assert found([1, 2, 3, END, 4, 5], [1, 2]).token_ids == (3,)
    assert found([1, 2, END, 4, 5], [1, 2]) == NO_DRAFT
    assert found([1, END, 2, 3], [1, 2]) == NO_DRAFT


def test_the_lookup_is_that_of_its_definition() -> None:
    rng = random.Random(0)
    num_found = 0
    for _ in range(400):
        size, low = rng.randint(2, 4), rng.randint(1, 3)
        text = [rng.choice([*range(size), END]) for _ in range(rng.randint(0, 40))]
        newest = [rng.randrange(size) for _ in range(rng.randint(0, 8))]
        if rng.random() < 0.5:
            text += newest
        args = rng.randint(1, 6), low, low + rng.randint(0, 5)
        draft = found(text, newest, *args)
        expected = plain_look_up(text, newest, *args)
        assert draft.token_ids == expected.token_ids
        assert draft.odds == pytest.approx(expected.odds)
        num_found += bool(draft.token_ids)
    assert 100 < num_found < 390


def test_a_long_match_is_found_although_its_last_token_is_frequent() -> None:
    passage = [1, 2, 3, 4, 0, 5, 6]
    text = passage + [t for i in range(300) for t in (10 + i, 0)]
    assert found(text, [1, 2, 3, 4, 0], 2).token_ids == (5, 6)


def test_expected_tokens_are_those_before_the_first_wrong_one() -> None:
    assert Draft((1, 2, 3), (0.5, 0.5, 1.0)).expected_tokens == 0.5 + 0.25 + 0.25
    assert Draft((1, 2, 3), (0.5, 0.4, 1.0)).first(2) == Draft((1, 2), (0.5, 0.4))


def text_of(recent: RecentOutputs, scope: str) -> list[int] | None:
    text = recent.of(scope)
    return None if text is None else text.tolist()


def test_outputs_are_kept_apart_by_scope() -> None:
    recent = RecentOutputs()
    recent.add("a", np.array([1, 2], np.int32))
    recent.add("b", np.array([3], np.int32))
    recent.add("a", np.array([4], np.int32))
    assert [text_of(recent, scope) for scope in "abc"] == [[END, 1, 2, END, 4], [END, 3], None]
    assert [recent.of(scope).dtype for scope in "ab"] == [np.int32] * 2


def test_the_scopes_that_were_used_longest_ago_are_forgotten() -> None:
    recent = RecentOutputs(max_tokens=16)
    for scope in "abcd":
        recent.add(scope, np.array([1, 2, 3], np.int32))
    assert text_of(recent, "a") == [END, 1, 2, 3]
    recent.add("e", np.array([5], np.int32))
    assert [scope for scope in "abcde" if recent.of(scope) is not None] == ["a", "c", "d", "e"]
    recent.add("e", np.array([6, 7, 8, 9], np.int32))
    assert text_of(recent, "e") == [6, 7, 8, 9], "a scope has no more than a quarter"


def test_memory_is_bounded_by_default() -> None:
    recent = RecentOutputs()
    for scope in range(6):
        recent.add(scope, np.zeros(20_000, np.int32))
    assert [len(recent.of(scope)) for scope in range(6) if recent.of(scope) is not None] == [2**14] * 4


def test_short_outputs_of_many_scopes_are_bounded_too() -> None:
    """A scope has the salt that a client has chosen, of up to 1,024 characters."""
    recent = RecentOutputs()
    for scope in range(1100):
        recent.add(scope, np.array([5, 6], np.int32))
    known = [scope for scope in range(1100) if recent.of(scope) is not None]
    assert known == list(range(1100 - 1024, 1100))


def test_the_whole_of_a_long_output_is_not_kept() -> None:
    recent = RecentOutputs(max_tokens=16)
    recent.add("a", np.arange(100_000, dtype=np.int32))
    text = recent.of("a")
    assert text is not None
    assert (len(text), text.base) == (4, None)


def test_all_tokens_are_kept_up_to_the_bound() -> None:
    recent = RecentOutputs(max_tokens=16)
    for scope in "abcd":
        recent.add(scope, np.array([1, 2, 3], np.int32))
        recent.add(scope, np.array([4], np.int32))
    assert [text_of(recent, scope) for scope in "abcd"] == [[2, 3, END, 4]] * 4

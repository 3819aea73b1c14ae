"""Drafts by looking up how the newest tokens went on before (prompt lookup, Saxena 2023; SuffixDecoding, Oliaro et al.
2024, arXiv 2411.04975).

A suffix tree answers the same question in less time for each token and much more for each text; the texts here are so
short that comparing all of their tokens takes some 20 microseconds. Between steps of models that drive them and the
code out of the caches it takes 200 to 600.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.common.batch import TokenIds

END = -1
"""Stands between the parts of a text that do not follow each other."""
MOST_ENDS = 1024
"""Occurrences of the newest token that are looked at, the latest ones: a text may repeat one token."""
ODDS_BEHIND_CHANGE = 0.6
"""How probable it seems that one token was replaced by one, and not left out or inserted."""
MOST_PLACES = 64
"""Occurrences of the newest `min_match` tokens that are followed, the latest ones."""


class Draft(NamedTuple):
    """Tokens that may come next."""

    token_ids: tuple[int, ...] = ()
    odds: tuple[float, ...] = ()
    """Of each token, how probable it seems if those before it are right."""

    def first(self, num_tokens: int) -> Draft:
        """Its first tokens."""
        return Draft(self.token_ids[:num_tokens], self.odds[:num_tokens])

    @property
    def expected_tokens(self) -> float:
        """The expected number of tokens that are right, up to the first that is not."""
        expected, probability = 0.0, 1.0
        for odds in self.odds:
            probability *= odds
            expected += probability
        return expected


NO_DRAFT = Draft()


def look_up(text: TokenIds, newest: TokenIds, num_tokens: int, *, min_match: int, max_match: int) -> Draft:
    """At most `num_tokens` tokens that followed the longest end of `newest` in `text`.

    At least `min_match` tokens must agree, and no more than `max_match` are compared. Where the text went on in several
    ways, the most frequent one is followed, and of equally frequent ones the latest. `text` may end with `newest`
    itself, and has END between parts that do not follow each other. The odds are the shares of the occurrences that
    went on this way, less for a short match.
    """
    if len(newest) < min_match or len(text) < 2:
        return NO_DRAFT
    ends = np.flatnonzero(text[:-1] == newest[-1])[-MOST_ENDS:]
    num_equal = 1
    while num_equal < min(max_match, len(newest)) and len(ends):
        if num_equal == min_match:
            ends = ends[-MOST_PLACES:]
        longer = ends[ends >= num_equal]
        longer = longer[text[longer - num_equal] == newest[-1 - num_equal]]
        if not len(longer):
            break
        ends, num_equal = longer, num_equal + 1
    if num_equal < min_match or not len(ends):
        return NO_DRAFT
    return _follow(text, ends[-MOST_PLACES:] + 1, num_tokens, num_equal / (num_equal + 1.0))


def go_on(text: TokenIds, newest: TokenIds, before: tuple[int, int]) -> tuple[int, float] | None:
    """Where `newest` goes on in `text` if its first `before[0]` tokens did at `before[1]`, and each token behind them
    stands for one there; and how probable that seems. None if the last two tokens differ there, or `text` is over."""
    place = before[1] + len(newest) - before[0]
    for distance, odds in ((1, 1.0), (2, ODDS_BEHIND_CHANGE)):
        at = place - distance
        if distance > len(newest) or (at >= 0 and place < len(text) and text[at] == newest[-distance]):
            return place, odds
    return None


def find(text: TokenIds, newest: TokenIds, max_match: int) -> tuple[int, float] | None:
    """The same where the longest end of `newest` is in `text`, of at most `max_match` tokens; of several such places
    that with the most similar number of tokens before it. None if there is none."""
    places, num_equal = np.arange(len(text)), 0
    while num_equal < min(max_match, len(newest)):
        longer = places[places > num_equal]
        longer = longer[text[longer - num_equal - 1] == newest[-1 - num_equal]]
        if not len(longer):
            break
        places, num_equal = longer, num_equal + 1
    nearest = int(places[np.abs(places - len(newest)).argmin()])
    return (nearest, num_equal / (num_equal + 1.0)) if num_equal else None


def _follow(text: TokenIds, places: npt.NDArray[np.intp], num_tokens: int, odds_of_match: float) -> Draft:
    """What follows most often from these places on."""
    token_ids: list[int] = []
    odds: list[float] = []
    while len(token_ids) < num_tokens:
        places = places[places < len(text)]
        if len(places) == 1:  # the rest of one text
            rest = text[places[0] : places[0] + num_tokens - len(token_ids)].tolist()
            rest = rest[: rest.index(END)] if END in rest else rest
            token_ids += rest
            odds += [odds_of_match] * len(rest)
            break
        found = text[places]
        token_id, count = _most_frequent(found.tolist())
        if count == 0:
            break
        token_ids.append(token_id)
        odds.append(odds_of_match * count / len(places))
        places = places[found == token_id] + 1
    return Draft(tuple(token_ids), tuple(odds))


def _most_frequent(token_ids: list[int]) -> tuple[int, int]:
    """The most frequent token and how often it occurs; of equally frequent ones the last. (END, 0) if there is none."""
    counts = Counter(reversed(token_ids))
    counts.pop(END, None)
    return counts.most_common(1)[0] if counts else (END, 0)

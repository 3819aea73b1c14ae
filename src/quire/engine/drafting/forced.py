"""Drafts that a grammar forces, or nearly: quotes, names of properties, what stands between values."""

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np

from quire.engine.drafting.lookup import NO_DRAFT, Draft
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup
from quire.text.grammar.state import GrammarState

_MOST_CHOICES = 256
"""A place where the grammar allows more tokens than these is the text of a value, of which it knows nothing."""
_REMEMBERED = 16
"""Tokens that are remembered for each kind of place, the latest ones."""
_MOST_PLACES = 4096
"""Kinds of places that are remembered, the latest used ones."""


@dataclass(slots=True)
class Walk:
    """The places on the way of a draft."""

    num_tokens: int
    """Those of the sequence when it began."""
    token_ids: list[int] = field(default_factory=list)
    odds: list[float] = field(default_factory=list)
    places: list[tuple[Hashable, ...]] = field(default_factory=list)
    """What each token's place is called, the most exact name first; none where the token is forced."""


class ForcedTokens:
    """Walks through a copy of the sequence's grammar. Where that forces a token, it is drafted, and it will be drawn.

    Other places allow a few tokens that differ in white space, or in where the tokenizer cuts the same text: there the
    token is drafted that was drawn most often of late where the grammar allowed the same, best behind the same token.
    These are remembered by tenant and content key, since the time of a request would reveal those of others.
    """

    name = "forced"

    def __init__(self) -> None:
        self._drawn: OrderedDict[Hashable, deque[int]] = OrderedDict()

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """See Drafter."""
        if seq.grammar is None or seq.drafting is None:
            return NO_DRAFT
        self._learn(seq.drafting.walk, seq.token_ids)
        walk = seq.drafting.walk = Walk(len(seq.token_ids))
        state, newest = seq.grammar.trial(), seq.token_ids[-1]
        while state is not None and len(walk.token_ids) < most and not state.is_finished:
            if not self._step(walk, state, newest, (group.tenant, group.content_key), most - len(walk.token_ids)):
                break
            newest = walk.token_ids[-1]
        return Draft(tuple(walk.token_ids), tuple(walk.odds))

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """See Drafter."""
        if seq.drafting is not None:
            self._learn(seq.drafting.walk, seq.token_ids)

    def _step(self, walk: Walk, state: GrammarState, newest: int, scope: Hashable, most: int) -> bool:
        """Go on by at most `most` tokens that are forced, or by one that is likely. False if there are none."""
        if forced := state.forced_tokens(always=True)[:most]:
            token_ids, odds, places = forced, [1.0] * len(forced), [()] * len(forced)
        else:
            mask = state.mask()
            if np.unpackbits(mask.view(np.uint8)).sum() > _MOST_CHOICES:
                return False
            name = hash(mask.tobytes())
            walk.places.append(((scope, name, newest), (scope, name)))
            drawn = next((known for place in walk.places[-1] if (known := self._drawn.get(place))), None)
            if drawn is None:
                return False
            (likeliest, count), *_ = Counter(reversed(drawn)).most_common(1)
            token_ids, odds, places = [likeliest], [count / (len(drawn) + 0.5)], []
        walk.token_ids += token_ids
        walk.odds += odds
        walk.places += places
        return all(state.advance(token_id) for token_id in token_ids)

    def _learn(self, walk: Walk | None, token_ids: list[int]) -> None:
        """Remember what was drawn at the places of a walk that the sequence has come to."""
        if walk is None:
            return
        for place, names in enumerate(walk.places):
            at = walk.num_tokens + place
            if at >= len(token_ids) or token_ids[walk.num_tokens : at] != walk.token_ids[:place]:
                break
            for name in names:
                self._drawn.setdefault(name, deque(maxlen=_REMEMBERED)).append(token_ids[at])
                self._drawn.move_to_end(name)
        while len(self._drawn) > _MOST_PLACES:
            self._drawn.popitem(last=False)

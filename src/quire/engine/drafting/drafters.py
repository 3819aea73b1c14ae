"""Where drafts come from."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from quire.config.speculative import PREDICTION, SpeculativeConfig
from quire.engine.drafting.forced import ForcedTokens
from quire.engine.drafting.lookup import NO_DRAFT, Draft, find, go_on, look_up
from quire.engine.drafting.model_drafts import ModelDrafts
from quire.engine.drafting.recent import RecentOutputs
from quire.engine.drafting.trust import SequenceDrafts
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup

_PREDICTED_ODDS = 0.9
"""How probable the next token of a prediction seems where it was right so far."""


class Drafter(Protocol):
    """Proposes tokens of the model's vocabulary that may follow a sequence's newest. Wrong ones cost time and change no
    output; an exception costs the draft. It changes nothing of the request, and the step waits for it."""

    name: str

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """At most `most` tokens, which is at least 1."""

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """The sequence has ended by a stop or a limit, and not by a failure or an abort."""


class OwnTokens:
    """What followed the newest tokens earlier in the same request: prompt lookup, n-grams."""

    name = "own"

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """See Drafter."""
        history = seq.history()
        return look_up(history, history, most, min_match=self._config.min_match, max_match=self._config.max_match)

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """See Drafter."""


class OthersTokens:
    """What followed in recent outputs of the same tenant and content key. Of others it knows nothing, since the time of
    a request would reveal it."""

    name = "recent"

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config
        self._recent = RecentOutputs()

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """See Drafter."""
        text = self._recent.of((group.tenant, group.content_key))
        if text is None:
            return NO_DRAFT
        return look_up(text, seq.history(), most, min_match=self._config.min_match, max_match=self._config.max_match)

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """Remember the output, and before it as much of the prompt as is compared."""
        if seq.num_output_tokens > 1:
            start = max(0, seq.num_prompt_tokens - self._config.max_match)
            self._recent.add((group.tenant, group.content_key), seq.history()[start:])


class Predicted:
    """The tokens that the caller expects, which are OpenAI's `prediction`."""

    name = PREDICTION

    def __init__(self, config: SpeculativeConfig) -> None:
        self._config = config

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """What follows in the prediction. A token that is another than predicted is taken for a change, and what
        follows it is proposed at once; behind two of them the place is looked for where most agrees."""
        text, output = group.prediction, seq.history()[seq.num_prompt_tokens :]
        if text is None:
            return NO_DRAFT
        known = seq.drafting or SequenceDrafts({})
        found = go_on(text, output, known.predicted) or find(text, output, self._config.max_match)
        if found is None:
            return NO_DRAFT
        place, odds = found
        known.predicted = len(output), place
        token_ids = text[place : place + most].tolist()
        return Draft(tuple(token_ids), (_PREDICTED_ODDS * odds, *(_PREDICTED_ODDS,) * (most - 1))[: len(token_ids)])

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """See Drafter."""


_DRAFTERS: Mapping[str, Callable[[SpeculativeConfig], Drafter]] = {
    **{kind.name: kind for kind in (OwnTokens, OthersTokens, Predicted)},
    ForcedTokens.name: lambda _: ForcedTokens(),
    ModelDrafts.name: ModelDrafts,
}


def make_drafters(config: SpeculativeConfig) -> Sequence[Drafter]:
    """The drafters of the config's method."""
    return [_DRAFTERS[name](config) for name in config.sources]

"""A model without weights: it defines the duration of a step and the tokens that are sampled."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Protocol

import numpy as np

from quire.common.batch import Batch, ScheduledSequence, StepResult, TokenLogprobs
from quire.engine.drafting.lookup import Draft
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup
from quire.interfaces.simulate.beams import INDEX_STEP
from quire.interfaces.simulate.trace import VOCAB_SIZE


class StepCost(Protocol):
    """How long steps take."""

    @property
    def swapped_block_s(self) -> float:
        """Seconds for each block copied between tiers."""

    def seconds(self, batch: Batch | None, num_decodes: int = 0, context: int = 0) -> float:
        """Return the seconds of a step that computes the batch, if any, and beside it a token each of `num_decodes`
        sequences, behind `context` tokens in all."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Computes the duration of a step from a fixed part, its tokens, the context read and the blocks swapped."""

    step_s: float = 0.020
    token_s: float = 0.0008
    context_token_s: float = 2e-7
    swapped_block_s: float = 2e-5

    def seconds(self, batch: Batch | None, num_decodes: int = 0, context: int = 0) -> float:
        """Return the seconds of a step that computes the batch, if any, and beside it a token each of `num_decodes`
        sequences, behind `context` tokens in all."""
        num_tokens, context, swapped = num_decodes, context + num_decodes, 0
        if batch is not None:
            num_tokens += batch.num_tokens
            context += sum([s.end for s in batch.sequences])
            swapped = sum([len(transfer.pairs) for transfer in batch.transfers])
        own_s = self.step_s + self.token_s * max(0, num_tokens - 32) + self.context_token_s * context
        return own_s + self.swapped_block_s * swapped


class FakeModel:
    """Each token is a hash of all tokens before it, so that one wrong token changes all later ones.

    Samples with the same history differ by their index. `history` returns the tokens of a sequence by its id.
    """

    def __init__(self, history: Callable[[int], Sequence[int]]) -> None:
        self._history = history
        self._states: dict[int, tuple[int, blake2b]] = {}
        self._expected: dict[int, tuple[list[int], int]] = {}
        """By sequence, the tokens that it should have, and how many of its own are known to be these."""

    def expect(self, seq_id: int, token_ids: list[int], num_known: int) -> None:
        """A new sequence of one sample, which is drawn with index 0 and without drafts, has the first `num_known` of
        these tokens. The others are those that the model would draw. They are drawn without hashing, for as long as
        what the sequence has is the same."""
        self._expected[seq_id] = token_ids, num_known

    def execute(self, batch: Batch) -> StepResult:
        """Return a token for each draw, with probability 1."""
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for scheduled in batch.sequences:
            if scheduled.seq_id in self._expected:
                num_drawn = 0 if scheduled.drawn is None else 1
                drawn = self._as_expected(scheduled.seq_id, scheduled.start, list(scheduled.token_ids), num_drawn)
                if drawn is not None:
                    tokens += drawn
                    continue
            for state in self._advance(scheduled):
                for draw in () if scheduled.drawn is None else scheduled.drawn.draws:
                    token_id = _next_token(state, draw.index)
                    if draw.logprobs is not None:
                        logprobs[len(tokens)] = _certain(token_id)
                    tokens.append(token_id)
        return StepResult(tuple(tokens), logprobs)

    def next_tokens(self, seq_id: int, start: int, token_id: int, index: int, num: int) -> list[int]:
        """Return the next `num` tokens that a sequence draws behind this one, which is at position `start`."""
        expected = self._as_expected(seq_id, start, [token_id], num)
        if expected is not None:
            return expected
        length, state = self._states.get(seq_id, (-1, None))
        if state is None or length != start:
            state = self._state(seq_id, start)
        update, digest, from_bytes, shift = state.update, state.digest, int.from_bytes, INDEX_STEP * index
        tokens: list[int] = []
        for _ in range(num):
            update(token_id.to_bytes(8, "little"))
            token_id = (from_bytes(digest(), "little") + shift) % VOCAB_SIZE
            tokens.append(token_id)
        self._states[seq_id] = start + num, state
        return tokens

    def _as_expected(self, seq_id: int, start: int, token_ids: list[int], num: int) -> list[int] | None:
        """Return the next `num` tokens behind these, which are at position `start`, if all tokens up to there are as
        expected; otherwise None, and no more are expected of the sequence."""
        tokens, num_known = self._expected.get(seq_id, (None, 0))
        if tokens is None:
            return None
        end = start + len(token_ids)
        is_same = num_known >= start or self._history(seq_id)[num_known:start] == tokens[num_known:start]
        if not is_same or tokens[start:end] != token_ids or end + num > len(tokens):
            del self._expected[seq_id]
            return None
        self._expected[seq_id] = tokens, max(num_known, end)
        return tokens[end : end + num]

    def continuation(self, seq_id: int, index: int, num_tokens: int) -> list[int]:
        """Return the next tokens of a sequence that draws with this index."""
        state, tokens = self._state(seq_id, len(self._history(seq_id))).copy(), list[int]()
        for _ in range(num_tokens):
            tokens.append(_next_token(state, index))
            state.update(array("q", tokens[-1:]).tobytes())
        return tokens

    def _advance(self, scheduled: ScheduledSequence) -> list[blake2b]:
        """Return, for each row that draws, the hash of the sequence's tokens up to it. The one before the drafts is
        kept, since they may be wrong."""
        length, known = self._states.get(scheduled.seq_id, (-1, None))
        state = (
            known if known is not None and length == scheduled.start else self._state(scheduled.seq_id, scheduled.start)
        )
        token_ids, num_drafts = scheduled.token_ids, scheduled.num_drafts
        num_certain = len(token_ids) - num_drafts
        state.update(array("q", token_ids[:num_certain] if num_drafts else token_ids).tobytes())
        self._states[scheduled.seq_id] = scheduled.start + num_certain, state
        states = [state]
        for token_id in token_ids[num_certain:]:
            states.append(states[-1].copy())
            states[-1].update(array("q", [token_id]).tobytes())
        return states

    def _state(self, seq_id: int, end: int) -> blake2b:
        """Return the hash of the sequence's first `end` tokens."""
        length, state = self._states.get(seq_id, (0, None))
        if state is None or length > end:  # new, or computed again
            length, state = 0, blake2b(digest_size=8)
        state.update(array("q", self._history(seq_id)[length:end]).tobytes())
        self._states[seq_id] = end, state
        return state

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that has ended."""
        self._states.pop(seq_id, None)
        self._expected.pop(seq_id, None)


class FakeDrafter:
    """Knows what the model will say, and errs as often as it is asked to: each draft is right with the probability
    `acceptance` if those before it are."""

    name = "fake"

    def __init__(self, model: FakeModel, acceptance: float) -> None:
        self._model, self._acceptance = model, acceptance
        self._rng = Random(0)

    def propose(self, group: SequenceGroup, seq: Seq, most: int) -> Draft:
        """See Drafter."""
        tokens = self._model.continuation(seq.seq_id, seq.draws[0].index, most)
        num_right = next((i for i in range(most) if self._rng.random() >= self._acceptance), most)
        wrong = [(token_id + 1) % VOCAB_SIZE for token_id in tokens[num_right:]]
        return Draft((*tokens[:num_right], *wrong), (self._acceptance,) * most)

    def finish(self, group: SequenceGroup, seq: Seq) -> None:
        """See Drafter."""


def _next_token(state: blake2b, index: int) -> int:
    return (int.from_bytes(state.digest(), "little") + INDEX_STEP * index) % VOCAB_SIZE


def _certain(token_id: int) -> TokenLogprobs:
    token_ids = np.array([[token_id, token_id]], np.int32)
    return TokenLogprobs(token_ids, np.zeros((1, 2), np.float32), np.ones(1, np.int32))

"""A model without weights: it defines the duration of a step and the tokens that are sampled."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from quire.common.batch import Batch, ScheduledSequence, StepResult, TokenLogprobs
from quire.interfaces.simulate.beams import INDEX_STEP
from quire.interfaces.simulate.trace import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class CostModel:
    """Computes the duration of a step from a fixed part, its tokens, the context read and the blocks swapped."""

    step_s: float = 0.020
    token_s: float = 0.0008
    context_token_s: float = 2e-7
    swapped_block_s: float = 2e-5

    def seconds(self, batch: Batch) -> float:
        """Return the seconds that the batch takes."""
        context = sum(s.end for s in batch.sequences)
        swapped = sum(len(transfer.pairs) for transfer in batch.transfers)
        return (
            self.step_s
            + self.token_s * max(0, batch.num_tokens - 32)
            + self.context_token_s * context
            + self.swapped_block_s * swapped
        )


class FakeModel:
    """Each token is a hash of all tokens before it, so that one wrong token changes all later ones.

    Samples with the same history differ by their index. `history` returns the tokens of a sequence by its id.
    """

    def __init__(self, history: Callable[[int], Sequence[int]]) -> None:
        self._history = history
        self._states: dict[int, tuple[int, blake2b]] = {}

    def execute(self, batch: Batch) -> StepResult:
        """Return a token for each draw, with probability 1."""
        tokens: list[int] = []
        logprobs: dict[int, TokenLogprobs] = {}
        for scheduled in batch.sequences:
            state = self._advance(scheduled)
            if scheduled.drawn is not None:
                value = int.from_bytes(state.digest(), "little")
                for draw in scheduled.drawn.draws:
                    token_id = (value + INDEX_STEP * draw.index) % VOCAB_SIZE
                    if draw.logprobs is not None:
                        logprobs[len(tokens)] = _certain(token_id)
                    tokens.append(token_id)
        return StepResult(tuple(tokens), logprobs)

    def _advance(self, scheduled: ScheduledSequence) -> blake2b:
        """Return the hash of all tokens of the sequence up to the end of the scheduled ones."""
        length, state = self._states.get(scheduled.seq_id, (-1, None))
        if state is None or length != scheduled.start:  # new, or computed again
            history = self._history(scheduled.seq_id)[: scheduled.start]
            state = blake2b(array("q", history).tobytes(), digest_size=8)
        state.update(array("q", scheduled.token_ids).tobytes())
        self._states[scheduled.seq_id] = (scheduled.end, state)
        return state

    def forget(self, seq_id: int) -> None:
        """Drop the state of a sequence that has ended."""
        self._states.pop(seq_id, None)


def _certain(token_id: int) -> TokenLogprobs:
    token_ids = np.array([[token_id, token_id]], np.int32)
    return TokenLogprobs(token_ids, np.zeros((1, 2), np.float32), np.ones(1, np.int32))

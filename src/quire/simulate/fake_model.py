"""A model without weights: what a step costs, and which tokens it draws."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from quire.batch import Batch, ScheduledSequence, StepResult
from quire.simulate.trace import VOCAB_SIZE

_INDEX_STEP = 7919


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: a start, the weights streamed or multiplied, the cache read, the blocks swapped."""

    step_s: float = 0.020
    token_s: float = 0.0008
    context_token_s: float = 2e-7
    swapped_block_s: float = 2e-5

    def seconds(self, batch: Batch) -> float:
        """How long the batch would take."""
        context = sum(s.end for s in batch.sequences)
        swapped = len(batch.swap_out) + len(batch.swap_in)
        return (
            self.step_s
            + self.token_s * max(0, batch.num_tokens - 32)
            + self.context_token_s * context
            + self.swapped_block_s * swapped
        )


class FakeModel:
    """The next token is a hash of the whole history, so that a wrong one is seen to the end of the request.

    Samples of one history differ by their index. `history` finds the tokens of a sequence by its id.
    """

    def __init__(self, history: Callable[[int], Sequence[int]]) -> None:
        self._history = history
        self._states: dict[int, tuple[int, blake2b]] = {}

    def execute(self, batch: Batch) -> StepResult:
        """A token for each draw."""
        tokens = []
        for scheduled in batch.sequences:
            state = self._advance(scheduled)
            if scheduled.draws:
                value = int.from_bytes(state.digest(), "little")
                tokens += [(value + _INDEX_STEP * draw.index) % VOCAB_SIZE for draw in scheduled.draws]
        return StepResult(tuple(tokens))

    def _advance(self, scheduled: ScheduledSequence) -> blake2b:
        """The hash of all tokens up to the end of these."""
        length, state = self._states.get(scheduled.seq_id, (-1, None))
        if state is None or length != scheduled.start:  # new, or computed again
            history = self._history(scheduled.seq_id)[: scheduled.start]
            state = blake2b(array("q", history).tobytes(), digest_size=8)
        state.update(array("q", scheduled.token_ids).tobytes())
        self._states[scheduled.seq_id] = (scheduled.end, state)
        return state

    def forget(self, seq_id: int) -> None:
        """The sequence has ended."""
        self._states.pop(seq_id, None)

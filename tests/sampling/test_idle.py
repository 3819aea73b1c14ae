"""What stands in the place of a sampler in a process whose logits another one reads."""

import torch

from quire.common.batch import ScheduledSequence, ScoredRows, StepResult
from quire.runner.sampling.sampler import MAX_LOGITS_ROWS, IdleSampler
from tests.sampling.plain import sequence
from tests.sampling.test_sampler import GREEDY


def scoring(seq_id: int, num_tokens: int, row: int, num_scored: int, num_top: int) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id, (5,) * num_tokens, 0, (), scored=ScoredRows(row, tuple(range(num_scored)), num_top)
    )


def test_it_draws_nothing() -> None:
    assert IdleSampler().sample(torch.zeros(1, 45), [sequence(GREEDY, [1])]) == StepResult(())


def test_it_computes_the_logits_of_all_scored_rows_and_returns_nothing() -> None:
    """The processes of a step exchange values in each computation of logits: so all compute the same ones."""
    long = 2 * MAX_LOGITS_ROWS + 3
    sequences = [scoring(0, long, 0, long, 2), sequence(GREEDY, [1]), scoring(2, 9, 4, 3, 2), scoring(3, 5, 0, 5, 0)]
    computed: list[list[int]] = []

    def compute_logits(rows: torch.Tensor) -> torch.Tensor:
        computed.append(rows.tolist())
        return torch.zeros(len(rows), 45)

    assert IdleSampler().score(sequences, [0, long, long + 1, long + 10], compute_logits) == {}
    wanted = [*range(long), *range(long + 5, long + 8)]
    assert computed == [
        wanted[:MAX_LOGITS_ROWS],
        wanted[MAX_LOGITS_ROWS : 2 * MAX_LOGITS_ROWS],
        wanted[2 * MAX_LOGITS_ROWS :],
        list(range(long + 10, long + 15)),
    ]

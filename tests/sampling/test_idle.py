"""What stands in the place of a sampler in a process whose logits another one reads."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from quire import kernels
from quire.common.batch import ScheduledSequence, ScoredRows, StepResult
from quire.runner.sampling.sampler import MAX_LOGITS_ROWS, IdleSampler, Sampler
from tests.kernels.isas import needs_native
from tests.parallel.test_gathers import Group
from tests.sampling.plain import sequence
from tests.sampling.test_sampler import CPU, GREEDY, VOCAB, random_sequence


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


def without_processors(s: ScheduledSequence) -> ScheduledSequence:
    assert s.drawn is not None
    draws = tuple(replace(draw, processors=()) for draw in s.drawn.draws)
    return replace(s, drawn=replace(s.drawn, draws=draws))


@needs_native
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_have_all_logits_draw_a_share_of_the_tokens_each(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(num_ranks)
    steps = [[random_sequence(rng, i) for i in range(count)] for count in (1, 2, 3, 12, 12, 1, 7)]
    steps[:4] = [[without_processors(s) for s in step] for step in steps[:4]]
    logits = [torch.randn(sum(len(s.drawn.draws) for s in step), VOCAB) * 3 for step in steps]
    alone = Sampler(CPU)
    expected = [alone.sample(each, step) for each, step in zip(logits, steps, strict=True)]
    drawn, sample = list[int](), kernels.sample

    def counted(some: torch.Tensor, how: kernels.SamplingTensors) -> torch.Tensor:
        drawn.append(len(some))
        return sample(some, how)

    monkeypatch.setattr(kernels, "sample", counted)
    group = Group(num_ranks, 1, 30.0, max(each.nbytes for each in logits))

    def run(ranks: kernels.Ranks) -> Sequence[Any]:
        sampler = IdleSampler(ranks) if ranks.shard.rank else Sampler(CPU, ranks=ranks)
        gather, results = kernels.Gather(ranks, [VOCAB, *[0] * (num_ranks - 1)]), list[Any]()
        for each, step in zip(logits, steps, strict=True):
            place = gather.place(len(each))
            assert place is not None
            if ranks.shard.rank == 0:
                place.copy_(each)
            results.append(sampler.sample(gather.placed(len(each)), step))
        return results

    first, *others = group.run(run)
    group.close()
    assert [each.token_ids for each in first] == [each.token_ids for each in expected]
    assert others == [[StepResult(())] * len(steps)] * (num_ranks - 1)
    assert sum(drawn) == sum(map(len, logits))
    assert len(drawn) > len(steps)

"""Rows whose hidden states are returned: those of exactly these rows, whatever else is wanted in the step."""

from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.common.batch import Batch, Draw, DrawnRows, PooledRows, ScheduledSequence, ScoredRows, StepResult
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model
from quire.runner.cache_engine import CacheEngine
from quire.runner.model_runner import ModelRunner
from tests.kernels.isas import needs_native

from .test_against_transformers import LLAMA, TOLERANCE

BLOCK_SIZE, MAX_LEN = 4, 24
BLOCKS_PER_SEQ = MAX_LEN // BLOCK_SIZE
POOLING, DRAWING, SCORING = (np.random.default_rng(i).integers(0, 90, 11).tolist() for i in range(3))
DRAWN = DrawnRows((Draw(0.0, 0, 1.0, b"", logprobs=2),), 0)
WANTED = {"last": PooledRows(10, 1), "middle": PooledRows(2, 5), "all": PooledRows(0, 11)}


def scheduled(seq_id: int, token_ids: list[int], start: int = 0, end: int = 11, **wanted: Any) -> ScheduledSequence:
    table = np.arange(seq_id * BLOCKS_PER_SEQ, (seq_id + 1) * BLOCKS_PER_SEQ, dtype=np.int32)
    return ScheduledSequence(seq_id, tuple(token_ids[start:end]), start, (table[: -(-end // BLOCK_SIZE)],), **wanted)


def drawing(start: int = 0, end: int = 11) -> ScheduledSequence:
    return scheduled(1, DRAWING, start, end, drawn=DRAWN)


class Steps:
    """A model's runner, and how transformers computes the hidden states of the tokens to be pooled."""

    def __init__(self, folder: Any, oracle: Any) -> None:
        config = ModelConfig.resolve(str(folder), dtype="float32")
        model = load_model(config)
        kv_cache = kv_cache_config(model.kv_cache_specs(config), BLOCK_SIZE, num_blocks=3 * BLOCKS_PER_SEQ)
        caches = CacheEngine(kv_cache, kernels.backend_for("cpu"))
        self.runner = ModelRunner(model, caches.layers, BLOCK_SIZE, MAX_LEN)
        with torch.no_grad():
            self.expected = oracle.model(torch.tensor([POOLING])).last_hidden_state[0].numpy()  # [num_tokens, hidden]

    def run(self, *sequences: ScheduledSequence) -> StepResult:
        return self.runner.run(Batch(1, sequences))


@pytest.fixture
def steps(save_checkpoint: Any) -> Steps:
    return Steps(*save_checkpoint("LlamaForCausalLM", **LLAMA))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_the_hidden_states_of_exactly_these_rows_come(steps: Steps, wanted: PooledRows) -> None:
    scoring = scheduled(2, SCORING, scored=ScoredRows(3, tuple(SCORING[4:]), 1))
    result = steps.run(drawing(), scheduled(0, POOLING, pooled=wanted), scoring)
    assert list(result.pooled) == [1], "one of three sequences wants hidden states"
    assert_close(result.pooled[1], steps.expected[wanted.row : wanted.row + wanted.num_rows])
    others = steps.run(drawing(), scheduled(0, POOLING), scoring)
    assert (result.token_ids, others.pooled) == (others.token_ids, {})
    assert list(result.scored) == [2]


def test_the_rows_of_a_chunk_are_counted_from_its_first_token(steps: Steps) -> None:
    steps.run(scheduled(0, POOLING, end=7))
    result = steps.run(scheduled(0, POOLING, start=7, pooled=PooledRows(1, 2)))
    assert_close(result.pooled[0], steps.expected[8:10])


@needs_native
def test_they_do_not_depend_on_the_batch(steps: Steps) -> None:
    wanted = scheduled(0, POOLING, pooled=WANTED["all"])
    alone = steps.run(wanted).pooled[0]
    for batch in ((drawing(), wanted), (wanted, drawing()), (drawing(0, 3), wanted, scheduled(2, SCORING))):
        assert np.array_equal(steps.run(*batch).pooled[batch.index(wanted)], alone)
    chunks = [steps.run(scheduled(0, POOLING, i, i + 1, pooled=PooledRows(0, 1))).pooled[0] for i in range(11)]
    assert np.array_equal(np.concatenate(chunks), alone)


def test_a_decode_step_that_is_replayed_elsewhere_returns_them_too(steps: Steps) -> None:
    """A row may be drawn from and pooled."""
    steps.run(drawing(end=10), scheduled(0, POOLING, end=10))
    both = scheduled(0, POOLING, 10, drawn=DRAWN, pooled=PooledRows(0, 1))
    result = steps.run(drawing(10), both)
    assert_close(result.pooled[1], steps.expected[10:])
    without = steps.run(drawing(10), scheduled(0, POOLING, 10, drawn=DRAWN))
    assert (result.token_ids, without.pooled) == (without.token_ids, {})

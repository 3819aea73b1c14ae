"""Rows whose hidden states are pooled: exactly these rows, whatever else runs in the step."""

from typing import Any

import numpy as np
import pytest
import torch

from quire import kernels
from quire.common.batch import Batch, PooledRows, PoolSpec, ScheduledSequence, StepResult
from quire.config.checkpoint.architectures import MODELS
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.models.base import PoolingModel
from quire.models.families.llama import LlamaForCausalLM
from quire.models.weights.loader import load_model
from quire.runner import model_runner
from quire.runner.cache_engine import CacheEngine
from quire.runner.model_runner import ModelRunner
from tests.kernels.isas import needs_native

from .test_against_transformers import LLAMA, TOLERANCE

BLOCK_SIZE, MAX_LEN = 4, 24
BLOCKS_PER_SEQ = MAX_LEN // BLOCK_SIZE
POOLING, OTHER = (np.random.default_rng(i).integers(0, 90, 11).tolist() for i in range(2))
SPEC = PoolSpec("token_embed")
WANTED = {"last": PooledRows(10, 1, SPEC), "middle": PooledRows(2, 5, SPEC), "all": PooledRows(0, 11, SPEC)}


def scheduled(seq_id: int, token_ids: list[int], start: int = 0, end: int = 11, **wanted: Any) -> ScheduledSequence:
    table = np.arange(seq_id * BLOCKS_PER_SEQ, (seq_id + 1) * BLOCKS_PER_SEQ, dtype=np.int32)
    return ScheduledSequence(seq_id, tuple(token_ids[start:end]), start, (table[: -(-end // BLOCK_SIZE)],), **wanted)


class AsTheyAre:
    """Gives the hidden states themselves."""

    tasks = ("token_embed",)
    dimensions = None

    def __init__(self) -> None:
        self.token_ids: list[Any] = []

    def reads(self, task: str) -> Any:
        return "all"

    def pool(self, hidden: torch.Tensor, token_ids: Any, spec: PoolSpec) -> torch.Tensor:
        self.token_ids.append(token_ids)
        return hidden.float()


class PooledLlama(LlamaForCausalLM, PoolingModel):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pooler = AsTheyAre()


class Steps:
    """A model's runner, and how transformers computes the hidden states of the tokens to be pooled."""

    def __init__(self, folder: Any, oracle: Any) -> None:
        config = ModelConfig.resolve(str(folder), dtype="float32")
        model = load_model(config)
        self.pooler = model.pooler
        kv_cache = kv_cache_config(model.kv_cache_specs(config), BLOCK_SIZE, num_blocks=3 * BLOCKS_PER_SEQ)
        backend = kernels.backend_for("cpu")
        self.runner = ModelRunner(model, CacheEngine(kv_cache, backend).layers, BLOCK_SIZE, MAX_LEN, backend)
        with torch.no_grad():
            self.expected = oracle.model(torch.tensor([POOLING])).last_hidden_state[0].numpy()  # [num_tokens, hidden]

    def run(self, *sequences: ScheduledSequence) -> StepResult:
        return self.runner.run(Batch(1, sequences))


@pytest.fixture(params=[1, 10**9])
def steps(request: pytest.FixtureRequest, save_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """With a last layer that leaves out rows that nothing reads, and with one that computes all."""
    monkeypatch.setattr(model_runner, "most_read", lambda num_tokens: num_tokens - request.param)
    monkeypatch.setitem(MODELS, "LlamaForCausalLM", f"{__name__}:PooledLlama")
    return Steps(*save_checkpoint("LlamaForCausalLM", **LLAMA))


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= TOLERANCE * np.abs(expected).max()


@pytest.mark.parametrize("wanted", WANTED.values(), ids=WANTED)
def test_the_hidden_states_of_exactly_these_rows_are_pooled(steps: Steps, wanted: PooledRows) -> None:
    result = steps.run(scheduled(1, OTHER), scheduled(0, POOLING, pooled=wanted), scheduled(2, OTHER))
    assert list(result.pooled) == [1], "one of three sequences wants a vector"
    assert_close(result.pooled[1], steps.expected[wanted.row : wanted.row + wanted.num_rows])
    assert steps.pooler.token_ids == [tuple(POOLING[wanted.row : wanted.row + wanted.num_rows])]
    assert steps.run(scheduled(0, POOLING)).pooled == {}


def test_the_rows_of_a_chunk_are_counted_from_its_first_token(steps: Steps) -> None:
    steps.run(scheduled(0, POOLING, end=7))
    result = steps.run(scheduled(0, POOLING, start=7, pooled=PooledRows(1, 2, SPEC)))
    assert_close(result.pooled[0], steps.expected[8:10])


@needs_native
def test_they_do_not_depend_on_the_batch(steps: Steps) -> None:
    wanted, other = scheduled(0, POOLING, pooled=WANTED["all"]), scheduled(1, OTHER)
    alone = steps.run(wanted).pooled[0]
    for batch in ((other, wanted), (wanted, other), (scheduled(1, OTHER, 0, 3), wanted, scheduled(2, OTHER))):
        assert np.array_equal(steps.run(*batch).pooled[batch.index(wanted)], alone)
    one = PooledRows(0, 1, SPEC)
    chunks = [steps.run(scheduled(0, POOLING, i, i + 1, pooled=one)).pooled[0] for i in range(11)]
    assert np.array_equal(np.concatenate(chunks), alone)

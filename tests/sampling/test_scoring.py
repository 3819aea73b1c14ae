"""Scored tokens, through the model: log-probabilities of a prompt in bounded memory, whatever runs beside it."""

import dataclasses

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from quire import kernels
from quire.common.batch import Batch, Draw, DrawnRows, ScheduledSequence, ScoredRows, TokenLogprobs
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.models.base import CausalLM
from quire.models.weights.loader import load_model
from quire.runner.cache_engine import CacheEngine
from quire.runner.decode_graphs import is_small_step
from quire.runner.model_runner import ModelRunner
from tests.kernels.isas import needs_native

BLOCK_SIZE, BLOCKS_PER_SEQ = 8, 26
GREEDY = Draw(0.0, 0, 1.0, b"")
PROMPTS = [np.random.default_rng(seed).integers(3, 8192, length).tolist() for seed, length in enumerate((200, 5, 70))]


@pytest.fixture(scope="module")
def model() -> CausalLM:
    return load_model(ModelConfig.resolve("quire-draft", dtype="bfloat16"))


def make_runner(model: CausalLM) -> ModelRunner:
    specs = model.kv_cache_specs(ModelConfig.resolve("quire-draft", dtype="bfloat16"))
    cache = kv_cache_config(specs, BLOCK_SIZE, num_blocks=BLOCKS_PER_SEQ * len(PROMPTS))
    backend = kernels.backend_for("cpu")
    return ModelRunner(model, CacheEngine(cache, backend).layers, BLOCK_SIZE, BLOCKS_PER_SEQ * BLOCK_SIZE, backend)


def chunk(seq: int, start: int, end: int, num_top: int = 2, draws: tuple[Draw, ...] = ()) -> ScheduledSequence:
    """Some of a prompt's tokens, each of which tells the score of the one after it."""
    prompt = PROMPTS[seq]
    table = (np.arange(BLOCKS_PER_SEQ, dtype=np.int32) + seq * BLOCKS_PER_SEQ,)
    targets = tuple(prompt[start + 1 : end + 1])
    scored = ScoredRows(0, targets, num_top) if targets else None
    drawn = DrawnRows(draws, len(prompt)) if draws else None
    return ScheduledSequence(seq, tuple(prompt[start:end]), start, table, drawn, scored)


def bits(parts: list[TokenLogprobs]) -> list[bytes]:
    return [
        np.concatenate([getattr(part, field.name) for part in parts]).tobytes()
        for field in dataclasses.fields(TokenLogprobs)
    ]


def whole(model: CausalLM, seq: int, **more) -> TokenLogprobs:
    return make_runner(model).run(Batch(0, (chunk(seq, 0, len(PROMPTS[seq]), **more),))).scored[0]


def test_scores_are_the_log_softmax_of_all_logits(model, monkeypatch):
    rows = []
    compute_logits = type(model).compute_logits

    def record(self, hidden):
        logits = compute_logits(self, hidden)
        rows.append(logits.clone())
        return logits

    monkeypatch.setattr(type(model), "compute_logits", record)
    scored = whole(model, 0, num_top=3)
    assert [len(part) for part in rows] == [64, 64, 64, 7]
    logits = torch.cat(rows)
    targets = torch.tensor(PROMPTS[0][1:])
    expected = logits.double().log_softmax(1)
    assert torch.equal(torch.from_numpy(scored.token_ids[:, 0]), targets.int())
    assert torch.equal(torch.from_numpy(scored.token_ids[:, 1:]).long(), logits.topk(3, 1).indices)
    torch.testing.assert_close(
        torch.from_numpy(scored.logprobs).double(),
        expected.gather(1, torch.from_numpy(scored.token_ids).long()),
        rtol=1e-6,
        atol=1e-6,
    )
    assert scored.ranks.tolist() == (1 + (logits > logits.gather(1, targets[:, None])).sum(1)).tolist()


@pytest.mark.essential
@needs_native
def test_bits_are_the_same_in_any_chunking_and_company(model):
    expected = [bits([whole(model, seq)]) for seq in range(3)]
    runner = make_runner(model)
    together = tuple(chunk(seq, 0, len(PROMPTS[seq]), draws=(GREEDY,) * seq) for seq in range(3))
    result = runner.run(Batch(0, together))
    assert [bits([result.scored[seq]]) for seq in range(3)] == expected
    assert len(result.token_ids) == 3
    for size in (1, 13, 64):
        runner, parts = make_runner(model), [[], [], []]
        for start in range(0, 200, size):
            sequences = [
                chunk(seq, start, min(start + size, len(prompt)))
                for seq, prompt in enumerate(PROMPTS)
                if start < len(prompt)
            ]
            for place, scored in runner.run(Batch(0, tuple(sequences))).scored.items():
                parts[sequences[place].seq_id].append(scored)
        assert [bits(p) for p in parts] == expected


def test_sequences_may_want_different_numbers_and_begin_anywhere(model):
    first, last = chunk(0, 0, 200, num_top=0), chunk(2, 0, 70, num_top=4)
    late = ScoredRows(40, tuple(PROMPTS[2][41:]), 4)
    last = ScheduledSequence(2, last.token_ids, 0, last.block_tables, DrawnRows((GREEDY,), 70), late)
    result = make_runner(model).run(Batch(0, (first, chunk(1, 4, 5), last)))
    assert sorted(result.scored) == [0, 2]
    assert result.scored[0].token_ids.shape == (199, 1)
    assert result.scored[2].token_ids.tolist() == whole(model, 2, num_top=4).token_ids[40:].tolist()


@needs_native
def test_a_step_is_recorded_unless_it_scores(model):
    table = (np.arange(BLOCKS_PER_SEQ, dtype=np.int32),)
    wanting = replace(GREEDY, logprobs=4, logit_bias=((5, 1.0),))
    plain = ScheduledSequence(0, (7,), 0, table, DrawnRows((wanting,), 1))
    scoring = ScheduledSequence(0, (7,), 0, table, DrawnRows((wanting,), 1), ScoredRows(0, (9,), 4))
    assert is_small_step([plain])
    assert not is_small_step([plain, scoring])
    runner = make_runner(model)
    replayed = [runner.run(Batch(0, (plain,))) for _ in range(3)]
    called = runner.run(Batch(0, (scoring,)))
    for result in replayed:
        assert result.token_ids == called.token_ids
        assert bits([result.logprobs[0]]) == bits([called.logprobs[0]])
    assert called.scored[0].token_ids[0, 1:].tolist() == called.logprobs[0].token_ids[0, 1:].tolist()
    assert not replayed[0].scored

"""A last layer that leaves out the rows that nothing reads gives the bits of one that computes all, and writes as many
keys and values."""

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from quire import LLM
from quire.common.batch import DrawnRows, PooledRows, PoolSpec, ScheduledSequence, ScoredRows
from quire.config.model import ModelConfig
from quire.kernels import embedding
from quire.models.layers.batch_tensors import LayerLatents, most_read
from quire.runner import decode_graphs, model_runner
from quire.runner.model_runner import build_tensors
from quire.runner.row_layout import read_span
from tests.engine import test_mixed_requests as mixed
from tests.kernels.isas import needs_native
from tests.models.latent import LATENT
from tests.models.test_against_transformers import VARIANTS
from tests.models.test_decode_graphs import BLOCK_SIZE, GREEDY, Decoding

STEPS = [[7, 5, 1], [1, 1, 6], [4, 1, 2], [2, 8, 3], [1, 3, 1], [5, 2, 9]]
"""Tokens of each of three sequences in a step."""
READ = [[1, 0, 1], [1, 1, 0], [0, 0, 0], [2, 3, 1], [0, 3, 1], [1, 0, 4]]
"""How many of their last rows are read."""


def scheduled(decoding: Decoding, counts: Sequence[int], read: Sequence[int]) -> list[ScheduledSequence]:
    """A step, in which tokens are drawn from these rows."""
    return [
        replace(s, drawn=DrawnRows((GREEDY,), 0, num_rows) if num_rows else None)
        for s, num_rows in zip(decoding.step([*range(len(counts))], counts), read, strict=True)
    ]


def caches(decoding: Decoding) -> list[Tensor]:
    """All that the layers keep."""
    return [
        tensor
        for layer in decoding.kv
        for tensor in ((layer.rows,) if isinstance(layer, LayerLatents) else (layer.k, layer.v))  # type: ignore[attr-defined]
    ]


def leave_out(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the last layer leaves out rows that nothing reads wherever a step has `least` of them."""
    for module in (decode_graphs, model_runner):
        monkeypatch.setattr(module, "most_read", lambda num_tokens: num_tokens - least)


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model_gives_the_rows_that_are_read(
    variant: str, save_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_out(1, monkeypatch)
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    for kv_cache_dtype, is_recorded in itertools.product(("auto",) if variant in LATENT else ("auto", "int8"), (0, 1)):
        config = ModelConfig.resolve(str(folder), dtype="float32")
        whole, narrow = (Decoding(config, 3, kv_cache_dtype) for _ in range(2))
        assert narrow.model.can_narrow
        for counts, read in zip(STEPS, READ, strict=True):
            tensors = build_tensors(scheduled(whole, counts, read), BLOCK_SIZE)
            all_hidden = whole.model(tensors, whole.kv)
            expected = whole.model.compute_logits(embedding(tensors.logit_rows, all_hidden)) if any(read) else None
            sequences = scheduled(narrow, counts, read)
            if is_recorded:
                actual = narrow.graphs.logits(sequences)
            else:
                tensors = build_tensors(sequences, BLOCK_SIZE, narrows=True)
                hidden = narrow.model(tensors, narrow.kv)
                assert len(hidden) == sum(read) < sum(counts)
                rows = tensors.of_hidden.logit_rows
                actual = narrow.model.compute_logits(embedding(rows, hidden)) if any(read) else None
            assert (actual is None) if expected is None else torch.equal(actual, expected)
            for kept, wanted in zip(caches(narrow), caches(whole), strict=True):
                assert torch.equal(kept.view(torch.uint8), wanted.view(torch.uint8))


def test_rows_are_counted_from_the_first_one_that_is_read() -> None:
    table = (torch.zeros(8, dtype=torch.int32).numpy(),)
    tokens, drawn, scored = (*range(10),), DrawnRows((GREEDY,), 0, 3), ScoredRows(4, (1, 2), 0)
    sequences = [
        ScheduledSequence(0, tokens, 0, table),
        ScheduledSequence(1, tokens, 0, table, drawn),
        ScheduledSequence(2, tokens, 0, table, drawn, scored),
        ScheduledSequence(3, tokens, 0, table, None, scored),
    ]
    assert [read_span(s) for s in sequences] == [(10, 10), (7, 10), (4, 10), (4, 10)]
    pooled = replace(sequences[0], pooled=PooledRows(2, 3, PoolSpec("embed")))
    assert read_span(pooled) == (2, 5)
    tensors = build_tensors([*sequences, *[sequences[0]] * 2], BLOCK_SIZE, narrows=True)
    assert tensors.read is not None
    assert tensors.read.rows.tolist() == [*range(17, 20), *range(24, 30), *range(34, 40)]
    assert tensors.of_hidden.query_start.tolist() == [0, 0, 3, 9, 15, 15, 15]
    assert tensors.of_hidden.logit_rows.tolist() == [0, 1, 2, 6, 7, 8]
    assert list(tensors.first_rows)[:4] == [-10, -7, -1, 5]
    assert list(tensors.whole.first_rows)[:4] == [0, 10, 20, 30]


def test_nothing_is_left_out_where_that_would_take_longer() -> None:
    """Keys and values of the rows that are read are computed twice."""
    assert [most_read(num_tokens) for num_tokens in (1, 31, 32, 40, 96, 99, 999)] == [-31, -1, 0, 8, 64, 66, 666]
    table = (torch.zeros(100, dtype=torch.int32).numpy(),)
    for num_rows, num_drawn, is_narrow in ((31, 1, 0), (33, 1, 1), (33, 2, 0), (120, 80, 1), (120, 81, 0)):
        drawn = ScheduledSequence(0, (7,) * num_rows, 0, table, DrawnRows((GREEDY,), 0, num_drawn))
        assert (build_tensors([drawn], BLOCK_SIZE, narrows=True).read is not None) == is_narrow
        assert build_tensors([drawn], BLOCK_SIZE).read is None


@needs_native
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mixed_requests_in_a_small_cache_have_the_bits_of_whole_layers(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(dtype)
    shared = [rng.randrange(3, mixed.VOCAB) for _ in range(mixed.LONGEST)]
    prompts, params = [mixed.any_prompt(rng, shared) for _ in range(40)], [mixed.any_params(rng) for _ in range(40)]
    leave_out(10**9, monkeypatch)
    expected = mixed.run(LLM(dtype=dtype, max_model_len=64, num_gpu_blocks_override=400), prompts, params)
    leave_out(1, monkeypatch)
    small: dict[str, Any] = {"num_gpu_blocks_override": 24, "max_num_seqs": 24, "max_num_batched_tokens": 96}
    assert mixed.run(LLM(dtype=dtype, max_model_len=64, swap_space=0.001, **small), prompts, params) == expected

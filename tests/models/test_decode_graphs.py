"""A recorded decode step gives, each time it is replayed, the bits of the model called again."""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.common.batch import Draw, DrawnRows, ScheduledSequence
from quire.common.errors import KernelError
from quire.config.kv_layout import kv_cache_config
from quire.config.model import ModelConfig
from quire.models.weights.loader import load_model
from quire.runner.cache_engine import CacheEngine
from quire.runner.decode_graphs import MAX_ROWS, DecodeGraphs, is_small_step
from quire.runner.model_runner import build_tensors
from tests.kernels.isas import needs_native
from tests.models.latent import LATENT
from tests.models.test_against_transformers import VARIANTS

BLOCK_SIZE = 4
MAX_LEN = 40
GREEDY = Draw(0.0, 0, 1.0, b"")
DRAWN = DrawnRows((GREEDY,), 0)


class Decoding:
    """Sequences that hold shuffled blocks and run one token a step."""

    def __init__(self, config: ModelConfig, num_seqs: int, kv_cache_dtype: str) -> None:
        self.model = load_model(config)
        specs = self.model.kv_cache_specs(config)
        if kv_cache_dtype != "auto":
            specs = [dataclasses.replace(spec, dtype=kv_cache_dtype) for spec in specs]
        blocks_per_seq = -(-MAX_LEN // BLOCK_SIZE)
        self.kv_cache = kv_cache_config(specs, BLOCK_SIZE, num_blocks=blocks_per_seq * num_seqs * len(specs))
        self.kv = CacheEngine(self.kv_cache, kernels.backend_for("cpu")).layers
        num_groups = len(self.kv_cache.groups)
        ids = np.random.default_rng(0).permutation(blocks_per_seq * num_seqs * num_groups).astype(np.int32)
        self.blocks = ids.reshape(num_seqs, num_groups, blocks_per_seq)
        self.lens = [0] * num_seqs
        self.tables: list[tuple[np.ndarray, ...]] = [()] * num_seqs
        self.rng = random.Random(3)
        self.graphs = DecodeGraphs(
            self.model, self.kv, BLOCK_SIZE, blocks_per_seq, kernels.backend_for("cpu"), kernels.Workspace()
        )

    def step(self, running: list[int], counts: Sequence[int] = ()) -> tuple[ScheduledSequence, ...]:
        """The next token of each of `running`, or as many as `counts` says, each of which draws. A table is the same
        object until it has to grow, as in an engine."""
        scheduled = []
        for s, count in zip(running, counts or [1] * len(running), strict=True):
            start, end = self.lens[s], self.lens[s] + count
            if -(-end // BLOCK_SIZE) > -(-start // BLOCK_SIZE):
                length = -(-end // BLOCK_SIZE)
                self.tables[s] = tuple(blocks[:length].copy() for blocks in self.blocks[s])
            tokens = tuple(self.rng.randrange(90) for _ in range(count))
            scheduled.append(ScheduledSequence(s, tokens, start, self.tables[s], DrawnRows((GREEDY,), 0, count)))
            self.lens[s] = end
        return tuple(scheduled)

    def called(self, sequences: tuple[ScheduledSequence, ...]) -> Tensor:
        return self.model.compute_logits(self.model(build_tensors(sequences, BLOCK_SIZE), self.kv))


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_model_can_be_replayed(variant: str, save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    for kv_cache_dtype in ("auto",) if variant in LATENT else ("auto", "int8"):
        decoding = Decoding(ModelConfig.resolve(str(folder), dtype="float32"), 4, kv_cache_dtype)
        seen = []
        for running in [[0], [0, 1], [1, 0], [0, 1, 2, 3], [3, 2, 1], [2], *[[0, 1, 2], [3, 1]] * 9]:
            sequences = decoding.step(running)
            assert decoding.graphs.can_replay(sequences)
            expected = decoding.called(sequences)
            actual = decoding.graphs.logits(sequences)
            assert torch.equal(actual, expected)
            seen.append(actual[0].clone())
        assert len({tuple(row.tolist()) for row in seen}) == len(seen), "every step should have logits of its own"


ROWS = [[4], [1, 1, 1, 1], [2, 2], [1, 3], [4], [2, 1, 1], [3, 1], [1, 2, 1]]
"""Of the sequences of steps that have four rows each."""


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("variant", ["llama-gqa", "deepseek-v2", "gemma3", "gpt-oss"])
def test_steps_with_as_many_rows_replay_one_recording(variant: str, save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    decoding = Decoding(ModelConfig.resolve(str(folder), dtype="float32"), 4, "auto")
    for counts in ROWS:
        sequences = decoding.step([*range(3, 3 - len(counts), -1)], counts)
        expected = decoding.called(sequences)
        assert torch.equal(decoding.graphs.logits(sequences), expected)
    assert len(decoding.graphs._recorded) == 1


@needs_native
@torch.inference_mode()
def test_passes_that_draft_for_nearly_as_many_sequences_replay_one_recording() -> None:
    decoding, recorded = Decoding(ModelConfig.resolve("quire-draft", dtype="float32"), 4, "auto"), []
    for counts, drafting in (([2, 2, 1, 1], 4), ([1, 2, 2, 1], 3), ([6], 1), ([3, 1, 2], 2), ([3, 3], 0), ([1, 5], 2)):
        sequences = decoding.step([*range(len(counts))], counts)
        ends = torch.tensor([sum(counts[: place + 1]) - 1 for place in range(drafting)], dtype=torch.int64)
        passes = [
            msgspec.structs.replace(s, drawn=DRAWN if place < drafting else None) for place, s in enumerate(sequences)
        ]
        expected = decoding.called(sequences)[ends]
        actual = decoding.graphs.logits(passes)
        assert (actual is None) if drafting == 0 else torch.equal(actual, expected)
        recorded.append(len(decoding.graphs._recorded))
    assert recorded == [1, 1, 2, 3, 4, 4], "for 4, 1, 2 and none"


@needs_native
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_quantized_weights_can_be_replayed(quantization: str | None) -> None:
    config = ModelConfig.resolve("quire-draft", dtype="bfloat16", quantization=quantization)
    decoding = Decoding(config, 3, "auto")
    with torch.inference_mode():
        for _ in range(6):
            sequences = decoding.step([0, 1, 2])
            assert torch.equal(decoding.graphs.logits(sequences), decoding.called(sequences))


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_modules_of_a_library_can_be_replayed_with_what_torch_computes(dtype: str, save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS["qwen3"]
    folder, _ = save_checkpoint(architecture, **fields)
    decoding = Decoding(ModelConfig.resolve(str(folder), dtype=dtype, model_impl="transformers"), 3, "auto")
    with torch.inference_mode():
        assert not decoding.graphs.can_replay([ScheduledSequence(0, (7, 8), 0, decoding.tables[0], DRAWN)])
        for running in [[0], [1, 0], [0, 1, 2], [0], [2, 1], [0, 1, 2]] * 2:
            sequences = decoding.step(running)
            assert decoding.graphs.can_replay(sequences)
            expected = decoding.called(sequences)
            assert torch.equal(decoding.graphs.logits(sequences), expected)


@needs_native
def test_only_small_steps_that_draw_are_recorded() -> None:
    table = (np.zeros(1, np.int32),)
    one, two, silent = (
        ScheduledSequence(0, tokens, 0, table, drawn)
        for tokens, drawn in (((7,), DRAWN), ((7, 8), DRAWN), ((7,), None))
    )
    assert is_small_step([one] * MAX_ROWS)
    assert not is_small_step([one] * (MAX_ROWS + 1))
    assert is_small_step([two, *[silent] * (MAX_ROWS - 2)])
    assert not is_small_step([two, *[silent] * (MAX_ROWS - 1)])
    assert not is_small_step([ScheduledSequence(0, (7,), 0, table, DrawnRows((GREEDY, GREEDY), 0))])
    assert not is_small_step([one, msgspec.structs.replace(one, token_type_ids=(0,))])


@needs_native
@torch.inference_mode()
@pytest.mark.parametrize("variant", ["llama-gqa", "deepseek-v2", "gemma3", "gpt-oss"])
def test_steps_replay_rows_that_are_not_read(variant: str, save_checkpoint: Any) -> None:
    """Tokens that a grammar forced, and ends of prompts, beside tokens and drafts."""
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields)
    decoding = Decoding(ModelConfig.resolve(str(folder), dtype="float32"), 4, "auto")
    for counts, read in (
        ([5], [1]),
        ([3, 1, 4], [2, 1, 0]),
        ([1, 6, 1], [1, 1, 1]),
        ([4, 3, 1], [1, 1, 1]),
        ([5], [1]),
    ):
        sequences = decoding.step([*range(len(counts))], counts)
        wanted = [
            msgspec.structs.replace(s, drawn=DrawnRows((GREEDY,), 0, num_rows) if num_rows else None)
            for s, num_rows in zip(sequences, read, strict=True)
        ]
        assert decoding.graphs.can_replay(wanted)
        ends = [sum(counts[: place + 1]) for place in range(len(counts))]
        rows = [row for end, num_rows in zip(ends, read, strict=True) for row in range(end - num_rows, end)]
        assert torch.equal(decoding.graphs.logits(wanted), decoding.called(sequences)[rows])
    assert len(decoding.graphs._recorded) == 2, "five rows with one that is read, and eight with up to four"


@needs_native
def test_a_step_that_fails_while_it_is_recorded_leaves_no_graph() -> None:
    decoding = Decoding(ModelConfig.resolve("quire-draft", dtype="bfloat16"), 1, "auto")
    with torch.inference_mode():
        (sequence,) = decoding.step([0])
        wrong = ScheduledSequence(0, (10**6,), sequence.start, sequence.block_tables, DRAWN)
        with pytest.raises(KernelError, match="token id 1000000 is not in"):
            decoding.graphs.logits([wrong])
        assert torch.equal(decoding.graphs.logits([sequence]), decoding.called((sequence,)))
        with pytest.raises(KernelError, match="token id 1000000 is not in"):
            decoding.graphs.logits([wrong])
        assert torch.equal(decoding.graphs.logits([sequence]), decoding.called((sequence,)))

"""A minimal runner: a model over a paged cache whose block tables are made by hand, in shuffled order."""

import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from torch import Tensor

from quire.config.kv_cache import KVCacheSpec
from quire.config.kv_layout import group_layers
from quire.config.model import ModelConfig
from quire.models.base import CausalLM
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors
from quire.models.layers.caches import view_cache
from quire.models.weights.loader import load_model
from tests.models.other_layouts import LAYOUTS
from tests.models.small_checkpoint import FIELDS, SMALL, weights, write

BLOCK_SIZE = 4


def unwritten_memory(spec: KVCacheSpec, num_blocks: int, dtype: torch.dtype) -> Tensor:
    """Large values where nothing was written: a read of another sequence's or a future slot shows."""
    return torch.full((num_blocks * spec.block_bytes(BLOCK_SIZE) // dtype.itemsize,), 99.0, dtype=dtype).view(
        torch.uint8
    )


class PagedRun:
    """Feeds chosen numbers of tokens of several sequences through a model; knows nothing of scheduling."""

    def __init__(self, model: CausalLM, config: ModelConfig, sequences: Sequence[Sequence[int]]) -> None:
        self.model = model
        self.sequences = [list(tokens) for tokens in sequences]
        self.computed = [0] * len(sequences)
        blocks_per_seq = -(-config.max_model_len // BLOCK_SIZE)
        groups = group_layers(model.kv_cache_specs(config), BLOCK_SIZE)
        num_blocks = blocks_per_seq * len(sequences) * len(groups)
        shuffled = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1)).to(torch.int32)
        self.tables = shuffled.view(len(groups), len(sequences), blocks_per_seq)
        # As in an engine, groups share memory: layer i of each keeps its blocks in piece i.
        dtype = getattr(torch, config.dtype)
        pieces = [unwritten_memory(groups[0].spec, num_blocks, dtype) for _ in groups[0].layer_ids]
        caches = {
            layer: view_cache(group.spec, piece, num_blocks, BLOCK_SIZE, group_id)
            for group_id, group in enumerate(groups)
            for layer, piece in zip(group.layer_ids, pieces, strict=False)
        }
        self.kv = [caches[layer] for layer in range(len(caches))]

    @torch.inference_mode()
    def step(self, counts: Sequence[int]) -> list[Tensor]:
        """Run the next `counts[s]` tokens of each sequence (0: leave it out); returns logits [counts[s], vocab]."""
        running = [s for s, count in enumerate(counts) if count]
        spans = [torch.arange(self.computed[s], self.computed[s] + counts[s]) for s in running]
        for s in running:
            self.computed[s] += counts[s]
        lens = torch.tensor([counts[s] for s in running])
        batch = BatchTensors(
            token_ids=torch.tensor(
                [self.sequences[s][p] for s, span in zip(running, spans, strict=True) for p in span]
            ),
            positions=torch.cat(spans),
            query_start=torch.cat([torch.zeros(1), lens.cumsum(0)]).to(torch.int32),
            seq_lens=torch.tensor([self.computed[s] for s in running], dtype=torch.int32),
            groups=tuple(self._group(table, running, spans) for table in self.tables),
            logit_rows=torch.arange(int(lens.sum())),
        )
        logits = self.model.compute_logits(self.model(batch, self.kv)[batch.logit_rows])
        assert logits.dtype == torch.float32
        parts = dict(zip(running, logits.split(lens.tolist()), strict=True))
        return [parts.get(s, logits[:0]) for s in range(len(counts))]

    def _group(self, table: Tensor, running: list[int], spans: list[Tensor]) -> GroupTensors:
        slots = [
            table[s, span // BLOCK_SIZE].long() * BLOCK_SIZE + span % BLOCK_SIZE
            for s, span in zip(running, spans, strict=True)
        ]
        return GroupTensors(torch.cat(slots), table[running].contiguous())


@pytest.fixture
def paged_run() -> type[PagedRun]:
    return PagedRun


@pytest.fixture
def greedy_run() -> Callable[..., tuple[list[list[int]], list[Tensor]]]:
    """Prefill prompts in chunks, then decode greedily: all tokens, and the logits of every position computed."""

    def run(
        config: ModelConfig, prompts: Sequence[Sequence[int]], *, chunk: int, num_tokens: int
    ) -> tuple[list[list[int]], list[Tensor]]:
        paged = PagedRun(load_model(config), config, prompts)
        rows: list[list[Tensor]] = [[] for _ in prompts]
        ends = [len(prompt) + num_tokens for prompt in prompts]
        while any(len(tokens) < end for tokens, end in zip(paged.sequences, ends, strict=True)):
            counts = [
                min(chunk, len(tokens) - done) if len(tokens) < end else 0
                for tokens, done, end in zip(paged.sequences, paged.computed, ends, strict=True)
            ]
            for s, logits in enumerate(paged.step(counts)):
                if counts[s]:
                    rows[s].append(logits)
                    if paged.computed[s] == len(paged.sequences[s]):
                        paged.sequences[s].append(int(logits[-1].argmax()))
        return paged.sequences, [torch.cat(parts) for parts in rows]

    return run


def make_checkpoint(
    parent: Path, architecture: str, *, dtype: torch.dtype = torch.float32, **fields: Any
) -> tuple[Path, Any]:
    """Make a small random transformers model, save it in a folder of `parent`, return the folder and the model (the
    oracle)."""
    import transformers

    torch.manual_seed(fields.pop("seed", 0))
    shard_size, table_scale = fields.pop("max_shard_size", "1GB"), fields.pop("table_scale", 1.0)
    layout = LAYOUTS.get(architecture)
    kind = getattr(transformers, layout.oracle if layout else architecture)
    model = kind(kind.config_class(**fields)).to(dtype).eval()
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        named = "norm" in name or "ln_" in name or name.endswith("bias")
        if named and parameter.is_floating_point():  # initialized to 1 and 0, where a mistake could hide
            torch.nn.init.normal_(parameter.data, mean=float(name.endswith("weight")), std=0.2)
    model.get_input_embeddings().weight.data *= table_scale  # small: outputs of layers count, tokens do not repeat
    folder = parent / "checkpoint"
    model.save_pretrained(folder, max_shard_size=shard_size)
    if layout:
        layout.rewrite(folder, model, architecture)
    return folder, model


@pytest.fixture
def save_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    return functools.partial(make_checkpoint, tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "checkpoint", FIELDS, weights())


@pytest.fixture
def llama(save_checkpoint: Callable[..., tuple[Path, Any]]) -> Path:
    """A Llama in float32 whose matrices fill words and groups."""
    return save_checkpoint("LlamaForCausalLM", **SMALL)[0]

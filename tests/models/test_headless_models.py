"""A model without a head, with two rows of positions, is loaded and run; embeddings stand in for token ids."""

import dataclasses
from typing import Any

import pytest
import torch

from quire.common.errors import UnsupportedModelError
from quire.config.kv_cache import KVCacheSpec
from quire.config.model import ModelConfig
from quire.models import registry
from quire.models.base import Model
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.embedding import Embedding
from quire.models.layers.linear import Linear
from quire.models.weights.loader import load_model, load_servable

from .test_against_transformers import LLAMA


class GridEncoder(Model):
    """Tokens on a grid: `down_proj(table[token] + table[row] + table[column])`, of a Llama's first layer."""

    renames = ((r"^model\.", ""), (r"^layers\.0\.self_attn\.q_proj", "proj"))
    ignored = (r"^layers\.", r"^norm", r"^lm_head")
    num_position_rows = 2

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(96, 32, torch.float32)
        self.proj = Linear(32, 32, bias=False, dtype=torch.float32)

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        return []

    def forward(self, batch: BatchTensors, kv: Any) -> torch.Tensor:
        row, column = batch.positions
        hidden: torch.Tensor = self.proj(self.embed(batch) + self.embed_tokens(row) + self.embed_tokens(column), batch)
        return hidden


def batch_of(token_ids: torch.Tensor | None, positions: torch.Tensor, **more: Any) -> BatchTensors:
    none = torch.empty(0, dtype=torch.int32)
    return BatchTensors(token_ids, positions, none, none, (), none, **more)


def test_a_headless_model_is_loaded_and_run(save_checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, oracle = save_checkpoint("LlamaForCausalLM", **LLAMA)
    monkeypatch.setitem(registry.MODELS, "GridEncoder", f"{__name__}:GridEncoder")
    config = dataclasses.replace(ModelConfig.resolve(folder), architecture="GridEncoder")
    model = load_model(config)
    table, weight = oracle.model.embed_tokens.weight, oracle.model.layers[0].self_attn.q_proj.weight
    ids, positions = torch.tensor([5, 60, 3]), torch.tensor([[0, 0, 1], [0, 1, 0]])
    expected = (table[ids] + table[positions[0]] + table[positions[1]]) @ weight.T
    hidden = model(batch_of(ids, positions), [])
    assert (hidden - expected).abs().max() < 1e-5
    assert torch.equal(model(batch_of(None, positions, embeddings=table[ids].detach()), []), hidden)
    with pytest.raises(UnsupportedModelError, match="GridEncoder gives hidden states and has no language model head"):
        load_servable(config)

"""Small models that pool: a decoder and an encoder, whose pooler shows which rows it was given."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM
from quire.common.batch import PoolSpec
from quire.config.checkpoint.architectures import POOLING_MODELS
from quire.config.kv_cache import KVCacheSpec, NoCacheSpec
from quire.config.model import ModelConfig
from quire.models.base import PoolingModel
from quire.models.families.llama import LlamaForCausalLM
from quire.models.layers.batch_tensors import BatchTensors, LayerKVCache
from quire.models.layers.embedding import Embedding
from quire.models.pooling import model as conversion

NAN, BROKEN = 5, 6
"""The last tokens of texts whose vectors are NaN, and whose pooling fails."""
SIZE = 8


class ScriptedPooler:
    """`embed` takes the last row, or with `mean` all rows; `classify` and the tasks of tokens take all."""

    tasks = ("embed", "token_embed", "classify", "score")

    def __init__(self, dimensions: int, *, mean: bool) -> None:
        self.dimensions = dimensions
        self.mean = mean
        self.num_rows: list[int] = []

    def reads(self, task: str) -> Any:
        return "all" if task != "embed" or self.mean else "last"

    def pool(self, hidden: Tensor, token_ids: Sequence[int], spec: PoolSpec) -> Tensor:
        assert len(hidden) == len(token_ids)
        self.num_rows.append(len(hidden))
        if token_ids[-1] == BROKEN:
            raise ValueError("a secret of the model")
        hidden = hidden.float()
        if token_ids[-1] == NAN:
            hidden = hidden * torch.nan
        if spec.task == "token_embed":
            return hidden[:, : spec.dimensions]
        vector = hidden.sum(0) if self.reads(spec.task) == "all" else hidden[-1]
        if spec.task == "embed":
            vector = vector[: spec.dimensions]
            return vector / vector.norm() if spec.normalize is not False else vector
        scores = vector[: 3 if spec.task == "classify" else 1]
        return scores if spec.activation is False else scores.sigmoid()


class TinyEmbedder(LlamaForCausalLM, PoolingModel):
    """A decoder that pools the last token."""

    mean = False

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.pooler = ScriptedPooler(config.hf_config.size("hidden_size"), mean=self.mean)


class TinyMeanEmbedder(TinyEmbedder):
    mean = True


class TinyEncoder(PoolingModel):
    """Each token's hidden state is its row of the table, plus the sum of its text's rows, plus its token type."""

    can_record = False  # torch computes
    ignored = (r"^(?!.*embed_tokens)",)
    renames = ((r"^model\.", ""),)

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size = config.hf_config.size("hidden_size")
        self.embed_tokens = Embedding(config.vocab_size, size, getattr(torch, config.dtype))
        self.pooler = ScriptedPooler(size, mean=True)
        self.steps: list[int] = []

    @classmethod
    def kv_cache_specs(cls, config: ModelConfig) -> list[KVCacheSpec]:
        return [NoCacheSpec()] * 2

    def forward(self, batch: BatchTensors, kv: Sequence[LayerKVCache]) -> Tensor:
        assert not kv
        rows = self.embed(batch).float()
        if rows.is_meta:
            return rows
        bounds = batch.query_start.tolist()
        assert batch.seq_lens.tolist() == [b - a for a, b in pairwise(bounds)], "texts run whole"
        self.steps.append(len(rows))
        types = 0 if batch.token_type_ids is None else batch.token_type_ids[:, None]
        texts = [rows[a:b] + rows[a:b].sum(0) for a, b in pairwise(bounds)]
        return torch.cat(texts) + types


@contextmanager
def known(model: type[PoolingModel]) -> Iterator[None]:
    """Inside, checkpoints of the embedded draft are loaded as this model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversion, "pooling_class", lambda causal, convert: model)
        patch.setitem(POOLING_MODELS, "TinyEncoder", f"{__name__}:TinyEncoder")
        yield


@contextmanager
def made_llm(model: type[PoolingModel], **arguments: Any) -> Iterator[LLM]:
    """An LLM over one of these models with the weights of the embedded draft."""
    kind = {"hf_overrides": {"architectures": ["TinyEncoder"]}} if model is TinyEncoder else {"runner": "pooling"}
    sizes = {"block_size": 4, "max_model_len": 48, "dtype": "float32"}
    sizes |= {} if model is TinyEncoder else {"num_gpu_blocks_override": 64}
    with known(model):
        llm = LLM("quire-draft", **{**sizes, "num_threads": 1, **kind, **arguments})
    yield llm  # without the patches, which other tests of this process must not see


def pooler_of(llm: LLM) -> ScriptedPooler:
    """The pooler that the engine calls."""
    return llm.engine.executor.runner.model.pooler

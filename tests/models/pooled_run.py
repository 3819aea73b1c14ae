"""Texts through a model that pools, packed one after another as the runner packs them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.common.batch import PoolSpec
from quire.models.layers.batch_tensors import BatchTensors


@torch.inference_mode()
def hidden_states(
    model: Any,
    texts: Sequence[Sequence[int]],
    token_type_ids: Sequence[Sequence[int]] | None = None,
    adapter: int | None = None,
) -> list[Tensor]:
    """[num_tokens, hidden] of each text, of a model without a cache, with the adapter in this slot."""
    lens = [len(text) for text in texts]
    flat = [token for text in texts for token in text]
    types = None if token_type_ids is None else torch.tensor([i for ids in token_type_ids for i in ids])
    batch = BatchTensors(
        token_ids=torch.tensor(flat),
        positions=torch.cat([torch.arange(n) for n in lens]),
        query_start=torch.tensor([0, *lens]).cumsum(0).int(),
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        groups=(),
        logit_rows=torch.empty(0, dtype=torch.int64),
        token_type_ids=types,
        adapters=None if adapter is None else torch.full((len(flat),), adapter),
    )
    return list(model(batch, []).split(lens))


@torch.inference_mode()
def pooled(model: Any, texts: Sequence[Sequence[int]], task: str, **how: Any) -> list[Tensor]:
    """What the pooler makes of each text."""
    rows = hidden_states(model, texts)
    spec = PoolSpec(task, **how)
    return [model.pooler.pool(row, text, spec) for row, text in zip(rows, texts, strict=True)]

"""How much memory a model computes in, found out by running it without weights and without arithmetic."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire import kernels
from quire.config.kv_cache import NoCacheSpec
from quire.config.lora import LoRAConfig
from quire.config.model import ModelConfig
from quire.config.parallel import Shard
from quire.kernels.variants import AttentionVariant, EncoderVariant
from quire.models.adapters.slots import AdapterSlots
from quire.models.base import Model
from quire.models.decoder.model import Decoder
from quire.models.heads.head import DraftHead
from quire.models.layers.batch_tensors import BatchTensors, GroupTensors, LayerCache, ReadRows, most_read
from quire.models.layers.caches import view_cache
from quire.models.weights.loader import unloaded_model

_BLOCK_SIZE = 16


def activation_bytes(
    config: ModelConfig, num_tokens: int, lora: LoRAConfig | None = None, ranks: kernels.Ranks | None = None
) -> int:
    """The most that the outputs of kernels, and of torch's operations in a model that has some, take at once in a
    forward pass of `num_tokens` tokens, and the states that a stage gets and gives; logits excluded. With `lora`, the
    tokens may have adapters. With `ranks`, that of this rank.

    The model runs on torch's meta device: its kernels allocate as always, but read no weights and compute nothing.
    """
    model = unloaded_model(config, ranks)
    meter = kernels.Meter()
    with torch.no_grad():  # not inference_mode, in which torch would hide the operations that others consist of
        for _, layer in model.weighted_layers():
            layer.set_weights({name: _meta(spec.shape, spec.dtype) for name, spec in layer.weight_specs().items()})
        model.to("meta")
        for module in model.modules():  # tables that layers made themselves
            for name, value in vars(module).items():
                if isinstance(value, Tensor):
                    setattr(module, name, _meta(value.shape, value.dtype))
                elif isinstance(value, AttentionVariant | EncoderVariant):
                    setattr(module, name, _on_meta(value))
        if lora is not None:
            AdapterSlots(model, lora)
        shard = Shard() if ranks is None else ranks.shard
        caches, num_read = _caches(model, config, shard), most_read(num_tokens)
        batches = list[BatchTensors]()
        for has_adapters in {False, lora is not None}:
            batches.append(whole := _batch(model, num_tokens, has_adapters))
            if model.can_narrow and num_read > 0:
                read = ReadRows(_meta((num_read,), torch.int64), _batch(model, num_read, has_adapters))
                batches.append(dataclasses.replace(whole, read=read))
        with meter.counting():
            for batch in batches:
                model(batch, caches)
    states = sum(boundary.token_bytes for boundary in model.boundaries) if isinstance(model, Decoder) else 0
    return meter.peak_bytes + num_tokens * states


def _on_meta(variant: Any) -> Any:
    """An attention variant with its tensors on the meta device."""
    values = ((field.name, getattr(variant, field.name)) for field in dataclasses.fields(variant))
    return dataclasses.replace(
        variant, **{name: _meta(t.shape, t.dtype) for name, t in values if isinstance(t, Tensor)}
    )


def _batch(model: Model, num_tokens: int, has_adapters: bool) -> BatchTensors:
    """One sequence."""
    rows = model.num_position_rows
    tokens = _meta((num_tokens,), torch.int64)
    positions = tokens if rows == 1 else _meta((rows, num_tokens), torch.int64)
    group = GroupTensors(tokens, _meta((1, -(-num_tokens // _BLOCK_SIZE)), torch.int32))
    query_start, seq_lens = _meta((2,), torch.int32), _meta((1,), torch.int32)
    rows_wanted = _meta((0,), torch.int64)
    adapters = tokens if has_adapters else None
    batch = BatchTensors(tokens, positions, query_start, seq_lens, (group,), rows_wanted, adapters=adapters)
    if isinstance(model, DraftHead):
        rows_in = (_meta((num_tokens, model.width), model.dtype) for _ in range(2))
        batch = dataclasses.replace(batch, embeddings=next(rows_in), states=next(rows_in))
    return batch


def _caches(model: Model, config: ModelConfig, shard: Shard) -> list[LayerCache]:
    """A block for each layer that keeps something."""
    all_specs = [spec.of_rank(shard) for spec in model.kv_cache_specs(config)[slice(*(config.layers or (None,)))]]
    specs = [spec for spec in all_specs if not isinstance(spec, NoCacheSpec)]
    buffers = (_meta((spec.block_bytes(_BLOCK_SIZE),), torch.uint8) for spec in specs)
    return [view_cache(spec, buffer, 1, _BLOCK_SIZE, 0) for spec, buffer in zip(specs, buffers, strict=True)]


def _meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")

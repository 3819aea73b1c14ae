"""The pass over a model's modules that leaves each of several processes (ranks) a part of its matrices and heads.

Matrices are cut by columns of their products, which are put together by copying, never added up. So every element is
computed by one rank, exactly as one process computes it, and has the same bits (ADR 0064). What is cheap is computed
by all ranks: norms, routers, sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from quire import kernels
from quire.common.errors import ConfigError, UnsupportedModelError
from quire.config.parallel import Shard, cut, key_heads, query_heads, shares
from quire.models.base import CausalLM, Model
from quire.models.decoder.attention import SelfAttention
from quire.models.decoder.latent import LatentAttention
from quire.models.decoder.mlp import GatedMLP, PlainMLP
from quire.models.layers.embedding import Embedding, TiedLmHead
from quire.models.layers.experts import Expert, Experts
from quire.models.layers.linear import Linear, LmHead, Projection

PANEL = 32
"""Columns that the kernels compute together (csrc/matmul/layout.h)."""


def split(model: Model, ranks: kernels.Ranks) -> None:
    """Let each layer keep and compute this rank's part alone, before weights are loaded.

    Raises UnsupportedModelError for a model that cannot be divided, and ConfigError if there are too many ranks.
    """
    if not isinstance(model, CausalLM) or model.needs_torch:
        raise UnsupportedModelError(
            f"tensor_parallel_size={ranks.shard.num_ranks}: a {type(model).__name__} cannot be divided among ranks; "
            "leave it at 1"
        )
    pass_ = _Split(ranks)
    for module in model.modules():  # what contains others comes first
        for kind, divide in pass_.kinds.items():
            if isinstance(module, kind) and module not in pass_.done:
                divide(module)
                break


class _Split:
    """One pass."""

    def __init__(self, ranks: kernels.Ranks) -> None:
        self._ranks, self._shard = ranks, ranks.shard
        self.done = set[nn.Module]()
        """Modules that the one around them has dealt with."""
        self.kinds: dict[type[nn.Module], Callable[[Any], None]] = {
            SelfAttention: self._attention,
            LatentAttention: self._latent_attention,
            GatedMLP: self._gated_mlp,
            PlainMLP: self._plain_mlp,
            Experts: self._experts,
            Linear: self._linear,
            LmHead: self._head,
            TiedLmHead: self._tied_head,
        }

    def _sizes(self, width: int) -> tuple[int, ...]:
        return cut(width, PANEL, self._shard.num_ranks)

    def _keep(self, layer: Projection, sizes: Sequence[int], num_parts: int = 1) -> None:
        """Keep a range of each of some equal parts of the rows."""
        start, end = self._shard.range_of(sizes)
        layer.kept = tuple((part * sum(sizes) + start, part * sum(sizes) + end) for part in range(num_parts))
        self.done.add(layer)

    def _linear(self, layer: Linear) -> None:
        sizes = self._sizes(layer.whole_shape[0])
        self._keep(layer, sizes)
        layer.gather_out = kernels.Gather(self._ranks, sizes)

    def _attention(self, attention: SelfAttention) -> None:
        shape, dim = attention.shape, attention.head_dim
        queries = query_heads(shape.num_heads, shape.num_kv_heads, self._shard)
        keys = key_heads(shape.num_kv_heads, self._shard)
        if attention.mixes_heads:
            self._linear(attention.qkv_proj)
        else:
            first_key, first_value = shape.num_heads, shape.num_heads + shape.num_kv_heads
            ranges = queries, *((first + keys[0], first + keys[1]) for first in (first_key, first_value))
            attention.qkv_proj.kept = tuple((start * dim, end * dim) for start, end in ranges)
            self.done.add(attention.qkv_proj)
        attention.keep_heads(queries, keys)
        self._gather_heads(attention.o_proj, shape.num_heads, shape.num_kv_heads, dim)

    def _latent_attention(self, attention: LatentAttention) -> None:
        shape = attention.shape
        first, end = query_heads(shape.num_heads, shape.num_heads, self._shard)
        queries = attention.q_proj if shape.query_rank is None else attention.q_b_proj
        dims = {queries: shape.head_dim, attention.kv_b_proj: shape.plain_dim + shape.value_dim}
        for layer, dim in dims.items():
            layer.kept = ((first * dim, end * dim),)
            self.done.add(layer)
        self._gather_heads(attention.o_proj, shape.num_heads, shape.num_heads, shape.value_dim)

    def _gather_heads(self, output: Linear, num_heads: int, num_kv_heads: int, dim: int) -> None:
        shards = [Shard(rank, self._shard.num_ranks) for rank in range(self._shard.num_ranks)]
        ranges = [query_heads(num_heads, num_kv_heads, shard) for shard in shards]
        output.gather_in = kernels.Gather(self._ranks, [(end - start) * dim for start, end in ranges])

    def _gated_mlp(self, mlp: GatedMLP) -> None:
        sizes = self._sizes(mlp.gate_up_proj.whole_shape[0] // 2)
        self._keep(mlp.gate_up_proj, sizes, 2)
        mlp.down_proj.gather_in = kernels.Gather(self._ranks, sizes)

    def _plain_mlp(self, mlp: PlainMLP) -> None:
        sizes = self._sizes(mlp.up_proj.whole_shape[0])
        self._keep(mlp.up_proj, sizes)
        mlp.down_proj.gather_in = kernels.Gather(self._ranks, sizes)

    def _experts(self, layer: Experts) -> None:
        """Each rank has columns of every expert, so all have as much to do whatever the router chooses. Or it has some
        experts, and the shared one is divided as any MLP."""
        if self._shard.has_whole_experts:
            self._keep_experts(layer)
            return
        first = layer.experts[0]
        assert isinstance(first, Expert)
        width, hidden = self._sizes(first.down_proj.whole_shape[1]), self._sizes(first.down_proj.whole_shape[0])
        for expert in layer.experts:
            assert isinstance(expert, Expert)
            self._keep(expert.gate_up_proj, width, 2)
            self._keep(expert.down_proj, hidden)
        layer.gather_width, layer.gather_out = (kernels.Gather(self._ranks, sizes) for sizes in (width, hidden))
        if isinstance(layer.shared_experts, GatedMLP):
            self._gated_mlp(layer.shared_experts)
            self._keep(layer.shared_experts.down_proj, hidden)
            self.done.add(layer.shared_experts)

    def _keep_experts(self, layer: Experts) -> None:
        num_experts, num_ranks = len(layer.experts), self._shard.num_ranks
        if num_experts < num_ranks:
            raise ConfigError(
                f"enable_expert_parallel=True: a layer has {num_experts} experts, fewer than "
                f"tensor_parallel_size={num_ranks}; lower that to at most {num_experts}, or leave it out"
            )
        sizes = shares(num_experts, num_ranks)
        first, end = layer.own = self._shard.range_of(sizes)
        for number in range(num_experts):
            if not first <= number < end:
                layer.experts[number] = nn.Identity()
        layer.gather_rows = kernels.GatherRows(self._ranks, sizes)

    def _head(self, head: LmHead) -> None:
        sizes = self._sizes(head.whole_shape[0])
        self._keep(head, sizes)
        head.gather_out = kernels.Gather(self._ranks, sizes, first_only=True)

    def _tied_head(self, head: TiedLmHead) -> None:
        table: Embedding = head.embedding
        sizes = self._sizes(table.shape[0])
        table.kept, table.shared = (self._shard.range_of(sizes),), kernels.SharedTable(self._ranks, sizes)
        head.gather_out = kernels.Gather(self._ranks, sizes, first_only=True)

"""What the distances of tokens add to the scores of an encoder's heads: weights, or products with queries and keys."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire import kernels
from quire.kernels import EncoderVariant
from quire.kernels.variants import UNMASKED
from quire.models.decoder.attention import SelfAttention
from quire.models.encoder.shapes import DistancesShape
from quire.models.layers.attention import DistanceHeads, EncoderAttention
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec

_MAX_DISTANCE = 128
_PADDING = 15


class RelativeBias(WeightedLayer):
    """A weight for each head and bucket of distances: half of the buckets for keys before the query, half for those
    after; half of these for single distances, the others for growing ranges of them (Raffel et al. 2020)."""

    def __init__(self, num_buckets: int, num_heads: int, max_len: int) -> None:
        """`max_len`: the most tokens of a sequence."""
        super().__init__()
        self.size = (num_buckets, num_heads)
        self.max_len = max_len
        self.variant: EncoderVariant = UNMASKED

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        kept = self.size[1] * (2 * self.max_len - 1 + _PADDING) * torch.float32.itemsize
        return {"weight": WeightSpec((Part(self.size),), torch.float32, kept_bytes=kept)}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        weight = tensors["weight"]  # [num_buckets, num_heads]
        if weight.is_meta:
            shape = (self.size[1], 2 * self.max_len - 1 + _PADDING)
            self.variant = EncoderVariant(bias=torch.empty(shape, device="meta"))
            return
        distances = torch.arange(1 - self.max_len, self.max_len + _PADDING)
        self.variant = EncoderVariant(bias=weight[buckets(distances, self.size[0])].T.contiguous())


def buckets(distances: Tensor, num_buckets: int) -> Tensor:
    """The bucket of each distance, which is the key's position less the query's."""
    half = num_buckets // 2
    exact = half // 2
    away = distances.abs()
    share = torch.log(away.clamp(min=1).float() / exact) / math.log(_MAX_DISTANCE / exact)
    far = (exact + (share * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, far) + (distances > 0) * half


class Distances(WeightedLayer):
    """A vector for each bucket of distances, of which the projections of every layer make a query and a key for each
    head: disentangled attention (He et al. 2021). It is filled after the layers, since it multiplies by their weights.
    """

    def __init__(self, shape: DistancesShape, hidden_size: int, max_len: int, layers: Sequence[SelfAttention]) -> None:
        """`max_len`: the most tokens of a sequence."""
        super().__init__()
        self.shape, self.max_len = shape, max_len
        self.size = (2 * shape.span, hidden_size)
        self._layers = layers
        for layer in layers:
            layer.qkv_proj.takes_adapters = False  # they would have to change the heads of distances too

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        num_heads = len(self._layers) * (self.shape.meets_queries + self.shape.meets_keys)
        kept = (num_heads * math.prod(self.size) + 2 * self.max_len - 1) * torch.float32.itemsize
        specs = {"weight": WeightSpec((Part(self.size),), torch.float32, kept_bytes=kept)}
        if self.shape.norm_eps is not None:
            of_norm = WeightSpec((Part(self.size[1:]),), torch.float32, kept_bytes=0)
            specs |= {"norm.weight": of_norm, "norm.bias": of_norm}
        return specs

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        table, term = tensors["weight"], self._terms(tensors["weight"].device)
        if self.shape.norm_eps is not None and not table.is_meta:
            table = kernels.layer_norm(table, tensors["norm.weight"], tensors["norm.bias"], self.shape.norm_eps)
        for layer in self._layers:
            projection = layer.qkv_proj
            if table.is_meta:  # memory is planned, and none is taken
                heads = table.new_empty((len(table), projection.shape[0]))
            else:
                heads = kernels.matmul(table.to(projection.dtype), projection.weight, projection.bias).float()
            queries, keys, _ = heads.view(len(table), 3, -1, layer.head_dim).permute(1, 2, 0, 3)
            assert isinstance(layer.attn, EncoderAttention)
            layer.attn.distances = DistanceHeads(
                kernels.pack_heads(keys) if self.shape.meets_queries else None,  # [num_heads, buckets, head_dim]
                kernels.pack_heads(queries) if self.shape.meets_keys else None,
                term,
            )

    def _terms(self, device: torch.device) -> Tensor:
        """[2 * max_len - 1] int32: the row of the table for each distance, which is the key's position less the
        query's."""
        if device.type == "meta":
            return torch.empty(2 * self.max_len - 1, dtype=torch.int32, device=device)
        back = -torch.arange(1 - self.max_len, self.max_len)
        if self.shape.num_buckets is not None:
            back = log_buckets(back, self.shape.num_buckets, self.shape.max_distance)
        return (back + self.shape.span).clamp_(0, 2 * self.shape.span - 1).int()


def log_buckets(distances: Tensor, num_buckets: int, max_distance: int) -> Tensor:
    """The bucket of each distance: up to half of the buckets the distance itself, and growing ranges beyond, the last
    of which ends with max_distance."""
    half = num_buckets // 2
    share = torch.log(distances.abs().clamp(min=half) / half) / torch.log(torch.tensor((max_distance - 1) / half))
    far = torch.ceil(share * (half - 1)) + half
    return torch.where(distances.abs() <= half, distances, (far * distances.sign()).long())

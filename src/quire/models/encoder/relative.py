"""Weights for distances, which all layers of an encoder add to the scores of their heads."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from quire.kernels import EncoderVariant
from quire.kernels.variants import UNMASKED
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

"""What tells one encoder from another: values that a family reads from a config, and that modules are built from."""

from dataclasses import dataclass

import torch

from quire.models.decoder.shapes import LayerShape, PositionsShape
from quire.models.layers.norm import NormShape


@dataclass(frozen=True, slots=True)
class EmbeddingsShape:
    """The norm of a sum of embeddings."""

    width: int
    """Of the tables; where it is not hidden_size, a projection leads in."""
    norm: NormShape
    """A LayerNorm."""
    positions: PositionsShape | None = None
    num_types: int = 0
    """Rows of the table for the texts of a pair."""


@dataclass(frozen=True, slots=True)
class DistancesShape:
    """A vector for each bucket of distances, whose queries and keys meet those of tokens (He et al. 2021)."""

    span: int
    """Half the number of the vectors."""
    num_buckets: int | None
    """Of logarithmic buckets; None: each distance has a vector."""
    max_distance: int
    """The distance at which logarithmic buckets end."""
    meets_queries: bool
    """Whether keys of distances meet queries of tokens."""
    meets_keys: bool
    """Whether queries of distances meet keys of tokens."""
    norm_eps: float | None
    """Of the LayerNorm of the vectors; None: they have none."""


@dataclass(frozen=True, slots=True)
class EncoderShape:
    """A whole encoder."""

    hidden_size: int
    embeddings: EmbeddingsShape
    layers: tuple[LayerShape, ...]
    """Those that have weights of their own."""
    order: tuple[int, ...]
    """The layers that a text goes through, by their index in `layers`."""
    final_norm: NormShape | None
    dtype: torch.dtype
    num_buckets: int | None = None
    """Of distances, for each of which all layers add a weight to the scores of a head (T5). None: nothing is added."""
    distances: DistancesShape | None = None

"""Token and position tables, and the head that shares the token table."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from quire import kernels
from quire.config.parallel import Range
from quire.models.layers.linear import Change, multiply_to_logits
from quire.models.layers.weight_format import Packed, WeightFormat, matrix_of_ranges, specs_of_ranges
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec


class Embedding(WeightedLayer):
    """Rows of a table [num_rows, width], by index. The table stays mapped from the checkpoint if its dtype is right.

    With `packed` it is kept in the layout of the matrix kernel instead, for a head tied to it. Index 0 is the table's
    row `first_row`.
    """

    table: Tensor | kernels.PackedWeight | kernels.QuantizedWeight

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, *, packed: bool = False, first_row: int = 0
    ) -> None:
        super().__init__()
        self.shape = (num_rows, width)
        self.dtype = dtype
        self.packed = packed
        self.format: WeightFormat = Packed()
        self.first_row = first_row
        self.changes: tuple[Change, ...] = ()
        """What is done to rows that were looked up."""
        self.kept: tuple[Range, ...] | None = None
        """The ranges of rows of a packed table that this rank has. None: all."""
        self.shared: kernels.SharedTable | None = None
        """Looks up rows where the ranks have divided them."""

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        parts = (Part(self.shape),)
        if self.packed:
            return specs_of_ranges(self.format, parts, self.kept, self.dtype)
        return {"weight": WeightSpec(parts, self.dtype, kept=True)}

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        if not self.packed:
            self.table = tensors["weight"][self.first_row :]
            return
        table = matrix_of_ranges(self.format, tensors, self.shape, self.kept, self.dtype)
        assert not isinstance(table, kernels.StackedWeight)  # it is one tensor
        self.table = table

    def forward(self, ids: Tensor) -> Tensor:
        """ids [num_tokens] -> [num_tokens, width]."""
        if self.shared is None:
            rows = kernels.embedding(ids, self.table)
        else:
            assert not isinstance(self.table, Tensor)
            rows = self.shared(ids, self.table)
        for change in self.changes:
            change(rows)
        return rows


class TiedLmHead(nn.Module):
    """The projection to the vocabulary by the (packed) token table; keeps no weights of its own."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.embedding = embedding
        self.gather_out: kernels.Gather | None = None
        """As of LmHead, and these too."""
        self.changes: tuple[Change, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """x [num_rows, hidden] -> logits [num_rows, vocab] float32."""
        table = self.embedding.table
        assert not isinstance(table, Tensor)
        return multiply_to_logits(x, table, None, self.changes, self.gather_out)

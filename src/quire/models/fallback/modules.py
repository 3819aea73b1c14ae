"""Quire's layers in the places of a library's: they take what the library's modules take, and keep Quire's weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from quire import kernels
from quire.common.errors import UnsupportedModelError
from quire.models.layers.activation import ACTIVATION_KINDS
from quire.models.layers.batch_tensors import BatchTensors
from quire.models.layers.embedding import Embedding, TiedLmHead
from quire.models.layers.experts import Expert, ExpertProducts
from quire.models.layers.linear import Linear, LmHead
from quire.models.layers.weighted_layer import Part, WeightedLayer, WeightSpec

GATE_UP = "stacked_gate_up"
"""The name of the matrix that is made of the `gate_proj` and `up_proj` of an expert or an MLP."""


@dataclass(frozen=True, slots=True, eq=False)
class RotaryTable:
    """Cosines and sines of a step, as a module of the library gave them, and as the kernels take them."""

    cos: Tensor
    sin: Tensor
    cos_sin: Tensor
    """[num_tokens, rotary_dim] float32."""
    rows: Tensor
    """The row of each token, [num_tokens] int64."""


class CurrentBatch:
    """The batch of the forward pass that runs in one model, for projections, which the library calls with x alone."""

    batch: BatchTensors

    def __init__(self) -> None:
        self.tables: list[RotaryTable] = []

    @contextmanager
    def running(self, batch: BatchTensors) -> Iterator[None]:
        """Keep the batch in the body, and what tables are made there."""
        self.batch = batch
        try:
            yield
        finally:
            del self.batch
            self.tables.clear()

    def table_of(self, cos: Tensor, sin: Tensor) -> RotaryTable | None:
        """The table that was made with these very tensors."""
        return next((table for table in self.tables if table.cos is cos and table.sin is sin), None)


class InnerLinear(nn.Module):
    """In the place of an `nn.Linear` inside the model."""

    def __init__(self, old: nn.Linear, current: CurrentBatch) -> None:
        super().__init__()
        self.linear = Linear(old.in_features, old.out_features, bias=old.bias is not None, dtype=old.weight.dtype)
        self._current = current

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in_features], one row for each token of the batch -> [..., out_features]."""
        out: Tensor = self.linear(x.reshape(-1, x.shape[-1]), self._current.batch)
        return out.view(*x.shape[:-1], -1)


class InnerMLP(nn.Module):
    """In the place of `down(act(gate(x)) * up(x))`."""

    def __init__(self, old: Any, kind: str, current: CurrentBatch) -> None:
        super().__init__()
        gate, up, down = old.gate_proj, old.up_proj, old.down_proj
        sizes, bias = (gate.out_features, up.out_features), gate.bias is not None
        self.gate_up = Linear(gate.in_features, sizes, bias=bias, dtype=gate.weight.dtype)
        self.down = Linear(down.in_features, down.out_features, bias=down.bias is not None, dtype=down.weight.dtype)
        self._activated, self._current = kernels.Activated(kind, is_gated=True), current

    def projections(self) -> Iterator[tuple[str, WeightedLayer]]:
        """Its layers, by their names below this module."""
        yield GATE_UP, self.gate_up
        yield "down_proj", self.down

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden], one row for each token of the batch -> as x."""
        batch = self._current.batch
        rows = x.reshape(-1, x.shape[-1])
        out = self.down.activated(self.gate_up(rows, batch), self._activated, batch)
        return out.view(*x.shape[:-1], -1)


class InnerExperts(ExpertProducts):
    """In the place of a layer's experts, which the library keeps in two tensors and its routers choose."""

    def __init__(self, old: Any) -> None:
        """Raises UnsupportedModelError for experts that are not gated MLPs in the library's common form."""
        width, activation = old.down_proj.shape[-1], activation_of(old.act_fn)
        (num_experts, hidden_size), dtype = old.down_proj.shape[:2], old.down_proj.dtype
        is_common = (
            {name for name, _ in old.named_parameters()} == {"gate_up_proj", "down_proj"}
            and old.gate_up_proj.shape == (num_experts, 2 * width, hidden_size)
            and old._apply_gate.__func__.__name__ == "_default_apply_gate"
            and old.is_concatenated
            and not (old.has_bias or old.is_transposed or old.has_post_expert_norm)
        )
        if not is_common or activation is None:
            raise UnsupportedModelError(f"{type(old).__name__} has experts that are not plain gated MLPs")
        super().__init__(num_experts, width, hidden_size, dtype, activation, top_k=0)

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether the library lets these experts be computed by others."""
        return all(hasattr(module, name) for name in ("has_gate", "_apply_gate", "gate_up_proj", "down_proj", "act_fn"))

    def projections(self) -> Iterator[tuple[str, WeightedLayer]]:
        """The layers of each expert, by their names below this module."""
        for i, expert in enumerate(self.experts):
            assert isinstance(expert, Expert)
            yield f"{i}.{GATE_UP}", expert.gate_up_proj
            yield f"{i}.down_proj", expert.down_proj

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [num_tokens, hidden], top_k_index and top_k_weights [num_tokens, top_k] -> as hidden_states."""
        if self.top_k == 0:  # the first run, before there are weights
            self.top_k = top_k_index.shape[-1]
            return torch.empty_like(hidden_states)
        y, rows = self.products(hidden_states.contiguous(), top_k_index.to(torch.int32).contiguous())
        return kernels.combine_experts(y, top_k_weights.float().contiguous(), rows)


def activation_of(module: object) -> str | None:
    """The kernels' name of an activation of the library, None if they lack it."""
    from transformers.activations import ACT2FN

    return next((kind for name, kind in ACTIVATION_KINDS.items() if type(ACT2FN[name]) is type(module)), None)


class TokenTable(nn.Module):
    """In the place of the token embedding, and of those that multiply its rows with a number."""

    def __init__(self, old: nn.Embedding, *, packed: bool) -> None:
        super().__init__()
        if type(old) is not nn.Embedding and not hasattr(old, "scalar_embed_scale"):
            raise UnsupportedModelError(f"its token table is a {type(old).__name__}")
        self.embedding = Embedding(old.num_embeddings, old.embedding_dim, old.weight.dtype, packed=packed)
        scale = getattr(old, "scalar_embed_scale", None)
        self._scale = None if scale is None else torch.tensor(scale, dtype=old.weight.dtype).item()

    def forward(self, ids: Tensor) -> Tensor:
        """ids [1, num_tokens] -> [1, num_tokens, width]."""
        rows: Tensor = self.embedding(ids.view(-1))[None]
        return rows if self._scale is None else rows * self._scale


class Head(nn.Module):
    """In the place of the projection to the vocabulary."""

    def __init__(self, head: LmHead | TiedLmHead, with_bias: nn.Linear | None = None) -> None:
        """`with_bias`: has what is added to logits, if anything is and `head` does not."""
        super().__init__()
        self.head, self.with_bias = head, with_bias

    def forward(self, x: Tensor) -> Tensor:
        """x [1, num_rows, hidden] -> [1, num_rows, vocab] float32."""
        logits: Tensor = self.head(x[0])
        bias = None if self.with_bias is None else self.with_bias.bias
        return logits[None] if bias is None else logits[None] + bias


class OwnTensors(WeightedLayer):
    """The parameters and saved buffers that a module of the library has itself, in the dtypes that it gave them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        buffers = {
            name: buffer for name, buffer in module._buffers.items() if name not in module._non_persistent_buffers_set
        }
        self._tensors = {name: tensor for name, tensor in (module._parameters | buffers).items() if tensor is not None}

    def weight_specs(self) -> Mapping[str, WeightSpec]:
        return {
            name: WeightSpec((Part(tuple(tensor.shape)),), tensor.dtype, kept=True)
            for name, tensor in self._tensors.items()
        }

    def set_weights(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if name in self._module._parameters:
                self._module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
            else:
                self._module._buffers[name] = tensor


class GivenHidden(nn.Module):
    """In the place of the layers, where only the head of a model runs: returns what it is given."""

    def forward(self, *_: object, inputs_embeds: Tensor, **others: object) -> "LastHidden":
        """inputs_embeds [1, num_rows, hidden] as the last hidden state."""
        return LastHidden(inputs_embeds)


class LastHidden:
    """What layers return in the library, with nothing but hidden states: whatever else a head hands on is None."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None

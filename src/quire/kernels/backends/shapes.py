"""Kernels on torch's meta device: outputs of the right shape without contents, to find out how much memory a model
computes in."""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from quire.kernels.backends.base import Backend
from quire.kernels.backends.recording import UncompiledMode
from quire.kernels.backends.reference_backend import ReferenceBackend, ReferenceLatentKernels
from quire.kernels.backends.workspace import Workspace, empty
from quire.kernels.experts.weights import ExpertRows, ExpertWeights, Routing
from quire.kernels.variants import Activated, ActivationKind, Sequences, Tables
from quire.kernels.weights import HeadWeights, LoRATable, LoRAWeight, PackedWeight, PlacedIntegers, QuantizedWeight

_ALIGNMENT = 64


class Meter(Workspace):
    """Takes no memory: kernels of a thread that has entered it put their outputs on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """As torch.empty, on the meta device."""
        return torch.empty(shape, dtype=dtype, device="meta")

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Enter it, and count in `peak_bytes` what is made in the body: the outputs of kernels, and of torch's own
        operations. What these take and free again within one operation is not counted."""
        with self, _Made() as made:
            yield
        self.peak_bytes = made.peak_bytes


class _Made(UncompiledMode):
    """Counts the memory of tensors from their making to their end."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, int] = {}
        """The bytes of each storage, by its address."""
        self._num_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                self._add(tensor.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, num_bytes = storage._cdata, -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._alive[address] = num_bytes
        self._num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)
        weakref.finalize(storage, self._forget, address).atexit = False

    def _forget(self, address: int) -> None:
        self._num_bytes -= self._alive.pop(address)


class ShapesBackend(ReferenceBackend):
    """What a forward pass calls, without arithmetic. Weights have the size that they have on `host`."""

    isa = "shapes"

    def __init__(self, host: Backend) -> None:
        super().__init__("meta")
        self._host = host
        self.latent = _LatentShapes(self)
        self.encoder = _EncoderShapes(self)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return empty(shape, dtype).to("meta")  # of a Meter, it is there already

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        n, k = weight.shape
        return PackedWeight(n, k, weight.dtype, weight, 0)

    def matmul(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor) -> None: ...

    def quantized_bytes(self, n: int, k: int, format: str, scale_range: int) -> int:
        return self._host.quantized_bytes(n, k, format, scale_range)

    def mapped_weight(self, n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
        return QuantizedWeight(n, k, dtype, format, data, 0)

    def weight_copy(self, data: Tensor) -> Tensor:
        return data

    def quantize_weight(self, weight: Tensor, format: str) -> QuantizedWeight:
        n, k = weight.shape
        return self.mapped_weight(n, k, weight.dtype, format, weight)

    def pack_blocks(self, rows: Tensor, k: int, dtype: torch.dtype, format: str) -> QuantizedWeight:
        return self.mapped_weight(rows.shape[0], k, dtype, format, rows)

    def pack_integers(
        self,
        parts: Sequence[PlacedIntegers],
        scales: Tensor,
        zeros: Tensor | None,
        dtype: torch.dtype,
        format: str,
        scale_range: int,
    ) -> QuantizedWeight:
        weight = self.mapped_weight(len(scales), len(parts[0].columns), dtype, format, scales)
        return dataclasses.replace(weight, scale_range=scale_range)

    def quantized_matmul(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, activated: Activated | None = None
    ) -> None:
        self.empty((self._host.quantized_work_bytes(weight, len(x)),), torch.uint8)

    def pack_lora(self, *arguments: Any, **named: Any) -> LoRAWeight:
        return self._host.pack_lora(*arguments, **named)

    def add_lora(self, x: Tensor, out: Tensor, adapters: LoRATable, slots: Tensor) -> None:
        self.empty((adapters.work_bytes(len(x)),), torch.uint8)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        shape = (len(logits), routing.top_k)
        return self.empty(shape, torch.int32), self.empty(shape, torch.float32)

    def group_by_expert(self, ids: Tensor, num_experts: int) -> ExpertRows:
        lengths = num_experts + 1, ids.numel(), ids.numel()
        return ExpertRows(ids.shape[1], *(self.empty((length,), torch.int32) for length in lengths))

    def expert_matmul(self, x: Tensor, experts: ExpertWeights, rows: ExpertRows, of_tokens: bool, out: Tensor) -> None:
        for part in range(len(experts.sizes)):
            self.empty((self._host.expert_work_bytes(experts, part, len(out), of_tokens),), torch.uint8)

    def combine_experts(
        self, y: Tensor, weights: Tensor, rows: ExpertRows, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        return self.empty((len(weights), y.shape[1]), y.dtype)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        return self.empty((len(token_ids), table.shape[1]), table.dtype)

    def gather_packed(self, token_ids: Tensor, table: PackedWeight | QuantizedWeight) -> Tensor:
        return self.empty((len(token_ids), table.k), table.dtype)

    gather_quantized = gather_packed

    def _like(self, x: Tensor, *_: object) -> Tensor:
        return self.empty(x.shape, x.dtype)

    rms_norm = add_rms_norm = layer_norm = add_layer_norm = head_layer_norm = _like  # type: ignore[assignment]
    activation = paged_attention = _like  # type: ignore[assignment]

    def gated_activation(self, x: Tensor, kind: ActivationKind, out: Tensor | None = None) -> Tensor:
        return self.empty((len(x), x.shape[1] // 2), x.dtype)

    def _nothing(self, *_: object) -> None: ...

    add = scale = clip = softcap = rotary_embedding = write_kv = _nothing  # type: ignore[assignment]


class _LatentShapes(ReferenceLatentKernels):
    def __init__(self, backend: ShapesBackend) -> None:
        self._empty = backend.empty

    def write(self, latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None: ...

    def attention(self, query: Tensor, cache: Tensor, seqs: Sequences, value_dim: int, scale: float) -> Tensor:
        return self._empty((*query.shape[:2], value_dim), query.dtype)

    def pack_heads(self, weights: Tensor) -> HeadWeights:
        return HeadWeights(weights.shape, weights.dtype, weights)

    def multiply_heads(self, x: Tensor, weights: HeadWeights) -> Tensor:
        return self._empty((*x.shape[:2], weights.n + x.shape[2] - weights.k), x.dtype)


class _EncoderShapes:
    def __init__(self, backend: ShapesBackend) -> None:
        self._empty = backend.empty

    def attention(self, query: Tensor, *_: object) -> Tensor:
        return self._empty(query.shape, query.dtype)

    def embedding_norm(self, tables: Tables, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        ids, table = next(ids for _, ids in tables if ids is not None), tables[0][0]
        return self._empty((len(ids), table.shape[1]), table.dtype)

    def pool_rows(self, x: Tensor, pooling: str) -> Tensor:
        return self._empty((x.shape[1],), torch.float32)

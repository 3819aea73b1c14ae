"""What differs between devices, behind one interface."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.backends.recording import KernelGraph
from quire.kernels.backends.workspace import Workspace
from quire.kernels.experts.weights import ExpertFiles, ExpertRows, ExpertWeights, Routing
from quire.kernels.sampling.tensors import SamplingTensors
from quire.kernels.variants import (
    Activated,
    ActivationKind,
    AttentionVariant,
    DistanceTerms,
    EncoderVariant,
    Sequences,
    Tables,
)
from quire.kernels.weights import (
    Factors,
    HeadWeights,
    LoRATable,
    LoRAWeight,
    PackedWeight,
    PlacedIntegers,
    QuantizedWeight,
)


class LatentKernels(Protocol):
    """The kernels of multi-head latent attention, as `Backend` has those of other layers.

    The definitions are in `backends/reference_attention.py`.
    """

    def make_cache(
        self, buffer: Tensor, num_blocks: int, block_size: int, width: int, dtype: torch.dtype
    ) -> Tensor: ...
    def is_cache(self, cache: Tensor) -> bool:
        """Whether it is laid out as `make_cache` does: [num_blocks, block_size, width]."""

    def write(self, latents: Tensor, rotary: Tensor, cache: Tensor, slots: Tensor) -> None: ...
    def copy_slots(self, cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None: ...
    def attention(self, query: Tensor, cache: Tensor, seqs: Sequences, value_dim: int, scale: float) -> Tensor: ...
    def pack_heads(self, weights: Tensor) -> HeadWeights: ...
    def multiply_heads(self, x: Tensor, weights: HeadWeights) -> Tensor: ...


class EncoderKernels(Protocol):
    """The kernels of encoders, as `Backend` has those of other layers.

    The definitions are in `backends/reference_attention.py` and `backends/reference_pooling.py`.
    """

    def attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        scale: float,
        variant: EncoderVariant,
        terms: DistanceTerms | None,
    ) -> Tensor: ...
    def embedding_norm(self, tables: Tables, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...
    def pool_rows(self, x: Tensor, pooling: str) -> Tensor: ...


class Backend(Protocol):
    """Kernels, memory, cache layout, threads and recordings of one device.

    The functions of `quire.kernels` choose a backend by the device of their tensors, check shapes, strides, dtypes and
    that all tensors are on that device, and call the method of the same name. So a method checks only values, such as
    ids and ranges: it raises ValueError or KernelError for those that do not fit. `backends/reference.py` and
    `backends/reference_sampling.py` define what each kernel computes.
    """

    @property
    def isa(self) -> str:
        """The variant of the kernels in use, such as avx512; `reference` for those in plain torch."""

    @property
    def can_record(self) -> bool:
        """Whether `graph` is available."""

    @property
    def holds(self) -> Callable[[Tensor], bool]:
        """Says whether a tensor is on this backend's device."""

    @property
    def cache_layout(self) -> str:
        """The layout of `make_layer_cache` in words, for error messages."""

    @property
    def latent(self) -> LatentKernels:
        """The kernels of multi-head latent attention."""

    @property
    def encoder(self) -> EncoderKernels:
        """The kernels of encoders."""

    def num_threads(self) -> int:
        """Threads that kernels called by this thread run on."""

    def set_num_threads(self, count: int, cpus: Sequence[int] = ()) -> None:
        """As `kernels.set_num_threads`."""

    def threads(self, count: int | None, cpus: Sequence[int] = ()) -> AbstractContextManager[object]:
        """Threads of their own, for the kernels that a thread calls while it is in this context.

        There are `count` of them, or one for each of `cpus`, each pinned there. Without both, the context changes
        nothing: kernels run on the default threads, which all callers share.
        """

    def reading_rate(self, weights: Sequence[Tensor]) -> float | None:
        """The bytes per second at which the threads of this thread's kernels together read weights, measured on these
        in less than 20 ms. None for so few bytes that a cache may hold them, for those that a disk has to read, and if
        this backend does not measure it."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for an output, from the workspace that this thread has entered, or of its own."""

    def workspace(self) -> Workspace:
        """A new workspace, whose memory the outputs of kernels share while a thread has entered it."""

    def graph(self) -> KernelGraph:
        """A new, empty recording. Raises KernelError unless `can_record`."""

    def zeroed_blocks(self, num_blocks: int, block_bytes: int) -> Tensor:
        """Memory of a KV cache, [num_blocks, block_bytes] uint8. Raises OutOfMemoryError."""

    def make_layer_cache(
        self, buffer: Tensor, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """As `kernels.make_layer_cache`, in this backend's layout."""

    def is_layer_cache(self, k_cache: Tensor, v_cache: Tensor) -> bool:
        """Whether these are laid out as `make_layer_cache` does. v_cache is always [num_blocks, num_kv_heads,
        block_size, head_dim]."""

    def pack_weight(self, weight: Tensor) -> PackedWeight: ...
    def unpack_weight(self, packed: PackedWeight) -> Tensor: ...
    def matmul(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        """Write the product to out [num_tokens, n], whose rows may be strided."""

    def quantized_bytes(self, n: int, k: int, format: str, scale_range: int) -> int: ...
    def mapped_weight(self, n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight: ...
    def weight_copy(self, data: Tensor) -> Tensor: ...
    def quantize_weight(self, weight: Tensor, format: str) -> QuantizedWeight | None:
        """None: an element is not finite."""

    def pack_blocks(self, rows: Tensor, k: int, dtype: torch.dtype, format: str) -> QuantizedWeight | None:
        """None: a scale or minimum is not finite."""

    def pack_integers(
        self,
        parts: Sequence[PlacedIntegers],
        scales: Tensor,
        zeros: Tensor | None,
        dtype: torch.dtype,
        format: str,
        scale_range: int,
    ) -> QuantizedWeight | None:
        """As pack_blocks."""

    def quantized_work_bytes(self, weight: QuantizedWeight, rows: int) -> int:
        """What `quantized_matmul` of so many rows takes beside its result."""

    def quantized_matmul(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, activated: Activated | None = None
    ) -> None: ...

    def pack_lora(
        self,
        factors: Sequence[Factors | None],
        sizes: tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        memory: Tensor | None,
    ) -> LoRAWeight:
        """Into `memory`, which is uint8, aligned and large enough, if the backend's layout lies in one piece."""

    def add_lora(self, x: Tensor, out: Tensor, adapters: LoRATable, slots: Tensor) -> None: ...

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]: ...
    def group_by_expert(self, ids: Tensor, num_experts: int) -> ExpertRows: ...
    def read_ahead(self, files: ExpertFiles, rows: ExpertRows) -> None: ...
    def expert_matmul(
        self, x: Tensor, experts: ExpertWeights, rows: ExpertRows, of_tokens: bool, out: Tensor
    ) -> None: ...
    def expert_work_bytes(self, experts: ExpertWeights, part: int, num_rows: int, of_tokens: bool) -> int:
        """The memory that the product of a part of the experts' matrices computes in."""

    def combine_experts(
        self, y: Tensor, weights: Tensor, rows: ExpertRows, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor: ...

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor: ...
    def gather_packed(self, token_ids: Tensor, table: PackedWeight) -> Tensor: ...
    def gather_quantized(self, token_ids: Tensor, table: QuantizedWeight) -> Tensor: ...

    def add(self, x: Tensor, residual: Tensor) -> None: ...
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...
    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...
    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> Tensor: ...
    def head_layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor: ...
    def scale(self, x: Tensor, factor: float) -> None: ...
    def clip(self, x: Tensor, limit: float) -> None: ...
    def softcap(self, x: Tensor, cap: float) -> None: ...
    def rotary_embedding(self, x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None: ...
    def activation(self, x: Tensor, kind: ActivationKind) -> Tensor: ...
    def gated_activation(self, x: Tensor, kind: ActivationKind, out: Tensor | None = None) -> Tensor: ...

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None: ...
    def gather_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]: ...
    def copy_slots(self, k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None: ...
    def copy_blocks(self, src: Tensor, dst: Tensor, pairs: Tensor) -> None: ...
    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, seqs: Sequences, scale: float, variant: AttentionVariant
    ) -> Tensor: ...
    def sample(self, logits: Tensor, how: SamplingTensors) -> Tensor: ...
    def processed_logits(self, logits: Tensor, how: SamplingTensors, rows: Tensor) -> Tensor: ...
    def top_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor, normalized: bool
    ) -> tuple[Tensor, Tensor, Tensor]: ...

"""The reference kernels as a backend, of any torch device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise

import torch
from torch import Tensor

from quire.common.errors import ConfigError, KernelError
from quire.common.faults import fault_point
from quire.kernels.backends import (
    key_layout,
    reference,
    reference_attention,
    reference_blocks,
    reference_pooling,
    reference_rotation,
    reference_sampling,
)
from quire.kernels.backends.base import EncoderKernels, LatentKernels
from quire.kernels.backends.recording import KernelGraph
from quire.kernels.backends.workspace import Workspace, zeroed_blocks
from quire.kernels.checks import check_range
from quire.kernels.experts.weights import ExpertFiles, ExpertRows, ExpertWeights
from quire.kernels.variants import Activated
from quire.kernels.weights import (
    Factors,
    HeadWeights,
    LoRATable,
    LoRAWeight,
    PackedWeight,
    PlacedIntegers,
    QuantizedWeight,
)


class ReferenceLatentKernels:
    """As LatentKernels."""

    make_cache = staticmethod(key_layout.make_latent_cache)
    is_cache = staticmethod(key_layout.is_latent_cache)
    write = staticmethod(reference_attention.write_latents)
    copy_slots = staticmethod(reference_attention.copy_latent_slots)
    attention = staticmethod(reference_attention.latent_attention)

    def pack_heads(self, weights: Tensor) -> HeadWeights:
        return HeadWeights(weights.shape, weights.dtype, weights.detach().clone())

    def multiply_heads(self, x: Tensor, weights: HeadWeights) -> Tensor:
        return reference_attention.multiply_heads(x, weights.data)


class ReferenceEncoderKernels:
    """As EncoderKernels."""

    attention = staticmethod(reference_attention.encoder_attention)
    embedding_norm = staticmethod(reference_pooling.embedding_norm)
    pool_rows = staticmethod(reference_pooling.pool_rows)


class ReferenceBackend:
    """Plain torch: slow, and torch's own memory for all outputs. Weights keep their shape when they are packed."""

    isa = "reference"
    can_record = False
    cache_layout = key_layout.CACHE_LAYOUT
    make_layer_cache = staticmethod(key_layout.make_layer_cache)
    is_layer_cache = staticmethod(key_layout.is_layer_cache)
    workspace = staticmethod(Workspace)

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self.latent: LatentKernels = ReferenceLatentKernels()
        self.encoder: EncoderKernels = ReferenceEncoderKernels()

    def holds(self, tensor: Tensor) -> bool:
        device = tensor.device
        return device.type == self._device.type and self._device.index in (None, device.index)

    def num_threads(self) -> int:
        return torch.get_num_threads()

    def set_num_threads(self, count: int, cpus: Sequence[int] = ()) -> None:
        _refuse_pinning(cpus)
        torch.set_num_threads(count)

    def threads(self, count: int | None, cpus: Sequence[int] = ()) -> AbstractContextManager[object]:
        _refuse_pinning(cpus)
        return nullcontext() if count is None else TorchThreads(count)

    def reading_rate(self, weights: Sequence[Tensor]) -> None:
        return None

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        fault_point("memory.workspace")
        return torch.empty(shape, dtype=dtype, device=self._device)

    def graph(self) -> KernelGraph:
        raise KernelError("the reference kernels cannot be recorded: a KernelGraph needs the native kernels")

    def zeroed_blocks(self, num_blocks: int, block_bytes: int) -> Tensor:
        return zeroed_blocks(num_blocks, block_bytes).to(self._device)

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        (n, k), data = weight.shape, weight.detach().clone(memory_format=torch.contiguous_format)
        return PackedWeight(n, k, weight.dtype, data, data.data_ptr())

    def unpack_weight(self, packed: PackedWeight) -> Tensor:
        return packed.data.clone()

    def matmul(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        out.copy_(reference.matmul(x, packed.data, bias, out.dtype))

    def quantized_bytes(self, n: int, k: int, format: str, scale_range: int) -> int:
        group = reference_blocks.GROUPS.get(format) or reference.group_size(k, format)
        has_mins = format in reference_blocks.WITH_MINS or format.endswith("_zeros")
        factors = 4 * k if format == "int8" else 0
        return n * -(-k // group) * (2 * group + 4 + 4 * has_mins) + factors

    def mapped_weight(self, n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
        raise KernelError("quantized weights that were saved need the native kernels, which are not in use")

    def weight_copy(self, data: Tensor) -> Tensor:
        return data.clone()

    def quantize_weight(self, weight: Tensor, format: str) -> QuantizedWeight | None:
        if not bool(weight.isfinite().all()):
            return None
        n, k = weight.shape
        integers, scales, factors = reference.quantize_weight(weight, format)
        data = integers.to(torch.int16)
        return QuantizedWeight(n, k, weight.dtype, format, data, data.data_ptr(), scales=scales, factors=factors)

    def pack_blocks(self, rows: Tensor, k: int, dtype: torch.dtype, format: str) -> QuantizedWeight | None:
        data, scales, mins = reference_blocks.split(rows, format)
        # MXFP4's NaN would be 2^127.
        if not all(part is None or bool((part.abs() < 2.0**127).all()) for part in (scales, mins)):
            return None
        return QuantizedWeight(len(rows), k, dtype, format, data, data.data_ptr(), scales=scales, mins=mins)

    def pack_integers(
        self,
        parts: Sequence[PlacedIntegers],
        scales: Tensor,
        zeros: Tensor | None,
        dtype: torch.dtype,
        format: str,
        scale_range: int,
    ) -> QuantizedWeight | None:
        bits, integers = parts[0].bits, torch.cat([part.values() for part in parts])
        if not bool((scales != 255 if scales.dtype is torch.uint8 else scales.isfinite()).all()):
            return None
        n, k = integers.shape
        data, scales, mins = reference.split_integers(integers, scales, zeros, bits, scale_range or 32)
        return QuantizedWeight(n, k, dtype, format, data, data.data_ptr(), scales=scales, mins=mins)

    def quantized_work_bytes(self, weight: QuantizedWeight, rows: int) -> int:
        return 0

    def quantized_matmul(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, activated: Activated | None = None
    ) -> None:
        assert weight.scales is not None
        if activated is not None:
            x = (self.gated_activation if activated.is_gated else self.activation)(x, activated.kind)
        x = x if weight.order is None else x[:, weight.order.long()]
        parts = weight.data, weight.scales, weight.mins
        out.copy_(reference.quantized_matmul(x, *parts, bias, out.dtype, weight.factors))

    def pack_lora(
        self,
        factors: Sequence[Factors | None],
        sizes: tuple[int, ...],
        k: int,
        dtype: torch.dtype,
        memory: Tensor | None,
    ) -> LoRAWeight:
        ranks = tuple(0 if pair is None else len(pair[0]) for pair in factors)
        a = torch.cat([pair[0].to(dtype) for pair in factors if pair is not None])
        b = tuple(
            a.new_zeros(n, 0) if pair is None else pair[1].to(dtype) for pair, n in zip(factors, sizes, strict=True)
        )
        return LoRAWeight(sizes, k, dtype, ranks, a, b)

    def add_lora(self, x: Tensor, out: Tensor, adapters: LoRATable, slots: Tensor) -> None:
        num_slots = len(adapters.weights)
        check_range("add_lora: adapter slot", slots, num_slots, first=-1)
        for slot, weight in enumerate(adapters.weights):
            rows = (slots == slot).nonzero()[:, 0]
            if weight is not None and len(rows):
                out[rows] = reference.with_lora(out[rows], x[rows], weight.a, weight.b, weight.ranks)

    def group_by_expert(self, ids: Tensor, num_experts: int) -> ExpertRows:
        check_range("group_by_expert: expert", ids, num_experts)
        flat = ids.flatten()
        pairs = flat.argsort(stable=True)
        ends = torch.bincount(flat, minlength=num_experts).cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends]).int()
        return ExpertRows(ids.shape[1], starts, pairs.int(), pairs.argsort().int())

    def read_ahead(self, files: ExpertFiles, rows: ExpertRows) -> None: ...

    def expert_work_bytes(self, experts: ExpertWeights, part: int, num_rows: int, of_tokens: bool) -> int:
        return 0

    def expert_matmul(self, x: Tensor, experts: ExpertWeights, rows: ExpertRows, of_tokens: bool, out: Tensor) -> None:
        x = x[rows.pairs.long() // rows.top_k] if of_tokens else x
        starts = rows.starts.tolist()
        for expert, (first, end) in enumerate(pairwise(starts)):
            column = 0
            for i, (part, n) in enumerate(zip(experts.experts[expert], experts.sizes, strict=True)):
                to, bias = out[first:end, column : column + n], experts.bias(expert, i)
                if isinstance(part, PackedWeight):
                    self.matmul(x[first:end], part, bias, to)
                else:
                    self.quantized_matmul(x[first:end], part, bias, to)
                column += n

    def combine_experts(
        self, y: Tensor, weights: Tensor, rows: ExpertRows, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        return reference.combine_experts(y, weights, rows.places, shared, gate)

    def gather_packed(self, token_ids: Tensor, table: PackedWeight) -> Tensor:
        return reference.embedding(token_ids, table.data)

    def gather_quantized(self, token_ids: Tensor, table: QuantizedWeight) -> Tensor:
        assert table.scales is not None
        rows = table.data * table.scales[..., None]
        rows = (rows if table.mins is None else rows - table.mins[..., None]).flatten(1)[:, : table.k]
        rows = rows if table.factors is None else reference_rotation.rotate_back(rows, table.factors)
        return reference.embedding(token_ids, rows.to(table.dtype))

    route = staticmethod(reference.route)
    embedding = staticmethod(reference.embedding)
    add = staticmethod(reference.add)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    add_layer_norm = staticmethod(reference.add_layer_norm)
    head_layer_norm = staticmethod(reference.head_layer_norm)
    activation = staticmethod(reference.activation)
    gated_activation = staticmethod(reference.gated_activation)
    scale = staticmethod(reference.scale)
    clip = staticmethod(reference.clip)
    softcap = staticmethod(reference.softcap)
    rotary_embedding = staticmethod(reference.rotary_embedding)
    write_kv = staticmethod(reference.write_kv)
    gather_kv = staticmethod(reference.gather_kv)
    copy_slots = staticmethod(reference.copy_slots)
    copy_blocks = staticmethod(reference.copy_blocks)
    paged_attention = staticmethod(reference_attention.paged_attention)
    sample = staticmethod(reference_sampling.sample)
    processed_logits = staticmethod(reference_sampling.processed_logits)
    top_logprobs = staticmethod(reference_sampling.top_logprobs)


class TorchThreads:
    """While it is entered, torch computes on this number of threads, which the whole process shares. With one thread it
    does not wait for others, whose cores the kernels' threads or other programs may use."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        torch.set_num_threads(self._count)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._before)


def _refuse_pinning(cpus: Sequence[int]) -> None:
    if cpus:
        raise ConfigError("only the native kernels' threads can be pinned to CPUs: install Quire with them")

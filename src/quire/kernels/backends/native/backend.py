"""The native extension as the CPU's backend."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from quire.config.parallel import check_threads
from quire.kernels.backends import key_layout, reference
from quire.kernels.backends.native.arguments import (
    DTYPE_CODES,
    FORMAT_CODES,
    NO_TERMS,
    SEES_ALL,
    activation_code,
    cache_of,
    place,
    rows_of,
    sample_args,
)
from quire.kernels.backends.native.encoder import NativeEncoderKernels
from quire.kernels.backends.native.latent import NativeLatentKernels
from quire.kernels.backends.native.lora import pack_lora
from quire.kernels.backends.native.reading import reading_rate
from quire.kernels.backends.recording import KernelGraph
from quire.kernels.backends.workspace import WeightMemory, Workspace, empty, zeroed_blocks
from quire.kernels.experts.weights import SCORINGS, ExpertFiles, ExpertRows, ExpertWeights, Routing
from quire.kernels.sampling.tensors import SamplingTensors
from quire.kernels.variants import Activated, ActivationKind, AttentionVariant, Sequences
from quire.kernels.weights import MAX_LORA_MODULES, LoRATable, PackedWeight, PlacedIntegers, QuantizedWeight


class NativeBackend:
    """Passes addresses, sizes and strides to `quire._native`, which checks values and knows nothing of tensors."""

    can_record = True
    cache_layout = key_layout.CACHE_LAYOUT
    holds = attrgetter("is_cpu")
    make_layer_cache = staticmethod(key_layout.make_layer_cache)
    is_layer_cache = staticmethod(key_layout.is_layer_cache)
    empty = staticmethod(empty)
    workspace = staticmethod(Workspace)
    zeroed_blocks = staticmethod(zeroed_blocks)
    pack_lora = staticmethod(pack_lora)

    def __init__(self, native: Any) -> None:
        self.native = native
        """quire._native, which is untyped."""
        self._weights = WeightMemory()
        self.weight_memory = self._weights.empty
        self.latent = NativeLatentKernels(native, self._weights)
        self.encoder = NativeEncoderKernels(native)

    @property
    def isa(self) -> str:
        return str(self.native.isa())

    def num_threads(self) -> int:
        return int(self.native.num_threads())

    def set_num_threads(self, count: int, cpus: Sequence[int] = ()) -> None:
        self.native.set_num_threads(count, cpus)

    def threads(self, count: int | None, cpus: Sequence[int] = ()) -> AbstractContextManager[object]:
        if not count and not cpus:
            return nullcontext()
        check_threads(num_threads := len(cpus) or count or 0)
        pool: AbstractContextManager[object] = self.native.ThreadPool(num_threads, cpus)
        return pool

    def reading_rate(self, weights: Sequence[Tensor]) -> float | None:
        return reading_rate(self.native, weights)

    def graph(self) -> KernelGraph:
        return KernelGraph(self.native.KernelGraph())

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        (n, k), size = weight.shape, weight.element_size()
        data = self._weights.empty(self.native.packed_bytes(n, k, size))
        self.native.pack(weight.data_ptr(), weight.stride(0) * size, n, k, size, data.data_ptr())
        return PackedWeight(n, k, weight.dtype, data, data.data_ptr())

    def unpack_weight(self, packed: PackedWeight) -> Tensor:
        weight = torch.empty(packed.n, packed.k, dtype=packed.dtype)
        self.native.unpack(packed.address, packed.n, packed.k, weight.element_size(), weight.data_ptr())
        return weight

    def matmul(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor) -> None:
        n, k, rows = packed.n, packed.k, x.shape[0]
        x_stride = k if x.is_contiguous() else x.stride(0)  # asking for a stride costs more than is_contiguous
        given = x.data_ptr(), x_stride, rows, packed.address, n, k, 0 if bias is None else bias.data_ptr()
        self.native.matmul(DTYPE_CODES[packed.dtype], *given, *place(out))

    def quantized_bytes(self, n: int, k: int, format: str, scale_range: int) -> int:
        return int(self.native.quantized_bytes(FORMAT_CODES[format], scale_range, n, k))

    def mapped_weight(self, n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
        return QuantizedWeight(n, k, dtype, format, data, data.data_ptr())

    def weight_copy(self, data: Tensor) -> Tensor:
        return self._weights.empty(data.nbytes).copy_(data)

    def quantize_weight(self, weight: Tensor, format: str) -> QuantizedWeight | None:
        n, k = weight.shape
        data = self._weights.empty(self.quantized_bytes(n, k, format, 0))
        codes = FORMAT_CODES[format], DTYPE_CODES[weight.dtype]
        is_finite = self.native.quantize(*codes, weight.data_ptr(), weight.stride(0), n, k, data.data_ptr())
        return QuantizedWeight(n, k, weight.dtype, format, data, data.data_ptr()) if is_finite else None

    def pack_blocks(self, rows: Tensor, k: int, dtype: torch.dtype, format: str) -> QuantizedWeight | None:
        n, code = rows.shape[0], FORMAT_CODES[format]
        data = self._weights.empty(self.quantized_bytes(n, k, format, 0))
        is_finite = self.native.pack_blocks(code, rows.data_ptr(), rows.stride(0), n, k, data.data_ptr())
        return QuantizedWeight(n, k, dtype, format, data, data.data_ptr()) if is_finite else None

    def pack_integers(
        self,
        parts: Sequence[PlacedIntegers],
        scales: Tensor,
        zeros: Tensor | None,
        dtype: torch.dtype,
        format: str,
        scale_range: int,
    ) -> QuantizedWeight | None:
        n, k = len(scales), len(parts[0].columns)
        data = self._weights.empty(self.quantized_bytes(n, k, format, scale_range))
        numbers = scales.data_ptr(), 0 if zeros is None else zeros.data_ptr(), n, k, data.data_ptr()
        is_finite, first = True, 0
        for part in parts:
            places = part.data.data_ptr(), part.rows.data_ptr(), part.columns.data_ptr(), first, len(part.rows)
            is_finite &= self.native.pack_integers(FORMAT_CODES[format], scale_range, *places, *numbers)
            first += len(part.rows)
        return QuantizedWeight(n, k, dtype, format, data, data.data_ptr(), scale_range) if is_finite else None

    def quantized_work_bytes(self, weight: QuantizedWeight, rows: int) -> int:
        codes = FORMAT_CODES[weight.format], weight.scale_range
        return int(self.native.quantized_rows_bytes(*codes, rows, weight.k))

    def quantized_matmul(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor, activated: Activated | None = None
    ) -> None:
        n, k, rows, codes = weight.n, weight.k, x.shape[0], (FORMAT_CODES[weight.format], weight.scale_range)
        work = empty((self.quantized_work_bytes(weight, rows),), torch.uint8)
        x_stride = x.shape[1] if x.is_contiguous() else x.stride(0)
        rows_at = x.data_ptr(), x_stride, rows, weight.address, n, k, 0 if bias is None else bias.data_ptr()
        order = 0 if weight.order is None else weight.order.data_ptr()
        first = (-1, 0.0, 0.0, 0.0) if activated is None else activation_code(activated.kind)
        is_gated = activated is not None and activated.is_gated
        given = *codes, DTYPE_CODES[weight.dtype], *rows_at, *place(out)
        self.native.quantized_matmul(*given, work.data_ptr(), order, *first, is_gated)

    def add_lora(self, x: Tensor, out: Tensor, adapters: LoRATable, slots: Tensor) -> None:
        rows, k, num_slots = x.shape[0], x.shape[1], len(adapters.weights)
        work = empty((adapters.work_bytes(rows),), torch.uint8)
        sizes = (*adapters.sizes, 0, 0)[:MAX_LORA_MODULES]
        given = x.data_ptr(), k, rows, k, slots.data_ptr(), adapters.address, num_slots, *sizes
        to = out.data_ptr(), out.shape[1], work.data_ptr(), adapters.most_ranks
        self.native.add_lora(DTYPE_CODES[x.dtype], *given, *to)

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        rows, how = len(logits), routing
        ids, weights = empty((rows, how.top_k), torch.int32), empty((rows, how.top_k), torch.float32)
        groups = how.num_groups, how.top_groups, how.has_pairs
        given = logits.data_ptr(), rows, how.num_experts, how.top_k, SCORINGS.index(how.scoring)
        bias_at, to = 0 if bias is None else bias.data_ptr(), (ids.data_ptr(), weights.data_ptr())
        self.native.route(*given, bias_at, *groups, how.is_normalized, how.scale, how.jitter, *to)
        return ids, weights

    def group_by_expert(self, ids: Tensor, num_experts: int) -> ExpertRows:
        count = ids.numel()
        starts = empty((num_experts + 1,), torch.int32)
        pairs, places = empty((count,), torch.int32), empty((count,), torch.int32)
        to = starts.data_ptr(), pairs.data_ptr(), places.data_ptr()
        self.native.group_by_expert(ids.data_ptr(), count, num_experts, *to)
        return ExpertRows(ids.shape[1], starts, pairs, places)

    def read_ahead(self, files: ExpertFiles, rows: ExpertRows) -> None:
        self.native.read_ahead(files.ranges.ctypes.data, *files.ranges.shape[:2], rows.starts.data_ptr())

    def expert_matmul(self, x: Tensor, experts: ExpertWeights, rows: ExpertRows, of_tokens: bool, out: Tensor) -> None:
        count, k, start = len(out), experts.k, 0
        pairs = rows.pairs.data_ptr() if of_tokens else 0
        given = DTYPE_CODES[x.dtype], x.data_ptr(), k, pairs, rows.top_k, count, rows.starts.data_ptr()
        for part, n in enumerate(experts.sizes):
            work_bytes, row_bytes = self._expert_work(experts, part, count, of_tokens)
            work = empty((work_bytes,), torch.uint8)
            entries = experts.entries.ctypes.data + part * experts.num_experts * experts.entries.strides[0]
            sizes = entries, experts.num_experts, n, k, work.data_ptr(), row_bytes
            self.native.expert_matmul(*given, *sizes, *place(out[:, start : start + n]))
            start += n

    def expert_work_bytes(self, experts: ExpertWeights, part: int, num_rows: int, of_tokens: bool) -> int:
        return self._expert_work(experts, part, num_rows, of_tokens)[0]

    def _expert_work(self, experts: ExpertWeights, part: int, num_rows: int, of_tokens: bool) -> tuple[int, int]:
        """The memory that a product computes in, and what one of its rows takes there."""
        k, row_bytes = experts.k, 0
        for format in experts.formats[part]:
            if format is not None:
                needed = int(self.native.quantized_rows_bytes(FORMAT_CODES[format[0]], format[1], 1, k))
            else:  # rows that are no neighbours are copied, odd numbers of cache lines apart
                needed = (-(-k * experts.dtype.itemsize // 64) | 1) * 64 if of_tokens else 0
            row_bytes = max(row_bytes, needed)
        return int(self.native.expert_work_bytes(num_rows, experts.num_experts, row_bytes)), row_bytes

    def combine_experts(
        self, y: Tensor, weights: Tensor, rows: ExpertRows, shared: Tensor | None, gate: Tensor | None
    ) -> Tensor:
        num_tokens, width = len(weights), y.shape[1]
        out = empty((num_tokens, width), y.dtype)
        added = 0 if shared is None else shared.data_ptr(), 0 if gate is None else gate.data_ptr()
        given = y.data_ptr(), weights.data_ptr(), rows.places.data_ptr(), num_tokens, rows.top_k, width
        self.native.combine_experts(DTYPE_CODES[y.dtype], *given, *added, out.data_ptr())
        return out

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        count, (vocab, hidden) = token_ids.numel(), table.shape
        out = empty((count, hidden), table.dtype)
        row_bytes = hidden * table.element_size()
        self.native.gather_rows(token_ids.data_ptr(), count, table.data_ptr(), vocab, row_bytes, out.data_ptr())
        return out

    def gather_packed(self, token_ids: Tensor, table: PackedWeight) -> Tensor:
        count, size = token_ids.numel(), table.dtype.itemsize
        out = empty((count, table.k), table.dtype)
        self.native.gather_packed(token_ids.data_ptr(), count, table.address, table.n, table.k, size, out.data_ptr())
        return out

    def gather_quantized(self, token_ids: Tensor, table: QuantizedWeight) -> Tensor:
        n, k, count = table.n, table.k, token_ids.numel()
        out, dtype = empty((count, k), table.dtype), DTYPE_CODES[table.dtype]
        codes = FORMAT_CODES[table.format], table.scale_range, dtype
        self.native.gather_quantized(*codes, token_ids.data_ptr(), count, table.address, n, k, out.data_ptr())
        return out

    def add(self, x: Tensor, residual: Tensor) -> None:
        rows, width = rows_of(x)
        self.native.add(DTYPE_CODES[x.dtype], x.data_ptr(), residual.data_ptr(), rows, width)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        shape, dtype = x.shape, x.dtype
        if x.is_contiguous():
            inner, width = 1, shape[-1]
            rows, outer_stride, inner_stride = x.numel() // (width or 1), width, width
        else:
            rows, inner, width = shape
            outer_stride, inner_stride, _ = x.stride()
        out = empty(shape, dtype)
        code, to = DTYPE_CODES[dtype], out.data_ptr()
        self.native.rms_norm(
            code, x.data_ptr(), weight.data_ptr(), eps, to, rows, inner, outer_stride, inner_stride, width
        )
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, residual.data_ptr(), weight, None, eps, is_rms=True)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._norm(x, 0, weight, bias, eps, is_rms=False)

    def head_layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        (outer, inner, width), (outer_stride, inner_stride, _) = x.shape, x.stride()
        out = empty(x.shape, x.dtype)
        bias_at, to = 0 if bias is None else bias.data_ptr(), out.data_ptr()
        sizes = outer, inner, outer_stride, inner_stride, width
        self.native.head_layer_norm(DTYPE_CODES[x.dtype], x.data_ptr(), weight.data_ptr(), bias_at, eps, to, *sizes)
        return out

    def add_layer_norm(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return self._norm(x, residual.data_ptr(), weight, bias, eps, is_rms=False)

    def _norm(
        self, x: Tensor, residual: int, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool
    ) -> Tensor:
        dtype, (rows, width) = x.dtype, rows_of(x)
        out = empty(x.shape, dtype)
        bias_at, to = 0 if bias is None else bias.data_ptr(), out.data_ptr()
        given = x.data_ptr(), residual, weight.data_ptr(), bias_at, eps
        self.native.norm(DTYPE_CODES[dtype], *given, to, rows, width, is_rms)
        return out

    def scale(self, x: Tensor, factor: float) -> None:
        rows, width = rows_of(x)
        self.native.scale(DTYPE_CODES[x.dtype], x.data_ptr(), rows, width, factor)

    def clip(self, x: Tensor, limit: float) -> None:
        rows, width = rows_of(x)
        stride = width
        if not x.is_contiguous():  # heads of tokens, which lie together
            rows, width, stride = len(x), x.shape[1] * width, x.stride(0)
        self.native.clip(DTYPE_CODES[x.dtype], x.data_ptr(), rows, width, stride, limit)

    def softcap(self, x: Tensor, cap: float) -> None:
        rows, width = rows_of(x)
        self.native.softcap(x.data_ptr(), rows, width, cap)

    def rotary_embedding(self, x: Tensor, positions: Tensor, cos_sin: Tensor, interleaved: bool) -> None:
        sizes, (token_stride, head_stride, _) = x.shape[:2], x.stride()
        code, at, table = DTYPE_CODES[x.dtype], positions.data_ptr(), cos_sin.data_ptr()
        max_positions, rotary_dim = cos_sin.shape
        given = code, x.data_ptr(), *sizes, token_stride, head_stride, at, table
        self.native.rotary(*given, max_positions, rotary_dim, interleaved)

    def activation(self, x: Tensor, kind: ActivationKind) -> Tensor:
        dtype, (rows, width) = x.dtype, rows_of(x)
        out = empty(x.shape, dtype)
        self.native.activation(DTYPE_CODES[dtype], *activation_code(kind), x.data_ptr(), rows, width, out.data_ptr())
        return out

    def gated_activation(self, x: Tensor, kind: ActivationKind, out: Tensor | None = None) -> Tensor:
        (rows, double_width), dtype = x.shape, x.dtype
        width, codes = double_width // 2, (DTYPE_CODES[dtype], *activation_code(kind))
        if out is None:
            out = empty((rows, width), dtype)
        self.native.gated_activation(*codes, x.data_ptr(), rows, width, *place(out)[:2])
        return out

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        cache, to, count = cache_of(self.native, k_cache, v_cache), slots.data_ptr(), slots.shape[0]
        k, k_stride, v, v_stride = key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0)
        if v_cache.dtype is torch.int8:
            self.native.quantize_kv(cache, DTYPE_CODES[key.dtype], k, k_stride, v, v_stride, to, count)
        else:
            item = key.element_size()
            self.native.write_kv(cache, k, k_stride * item, v, v_stride * item, to, count)

    def gather_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        _, num_kv_heads, _, head_dim = v_cache.shape
        if v_cache.dtype is torch.int8:  # rarely read back, so there is no native kernel
            return reference.gather_kv(k_cache, v_cache, slots)
        key = torch.empty((slots.shape[0], num_kv_heads, head_dim), dtype=v_cache.dtype)
        value = torch.empty_like(key)
        cache = cache_of(self.native, k_cache, v_cache)
        self.native.gather_kv(cache, slots.data_ptr(), slots.shape[0], key.data_ptr(), value.data_ptr())
        return key, value

    def copy_slots(self, k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
        cache = cache_of(self.native, k_cache, v_cache)
        self.native.copy_slots(cache, src_slots.data_ptr(), dst_slots.data_ptr(), src_slots.shape[0])

    def copy_blocks(self, src: Tensor, dst: Tensor, pairs: Tensor) -> None:
        pools = src.data_ptr(), src.shape[0], dst.data_ptr(), dst.shape[0], src.shape[1]
        self.native.copy_blocks(*pools, pairs.data_ptr(), pairs.shape[0])

    def paged_attention(
        self, query: Tensor, k_cache: Tensor, v_cache: Tensor, seqs: Sequences, scale: float, variant: AttentionVariant
    ) -> Tensor:
        query_start, seq_lens, block_tables = seqs
        num_tokens, num_heads, head_dim = query.shape
        num_blocks, num_kv_heads, block_size, _ = v_cache.shape
        out = empty((num_tokens, num_heads, head_dim), query.dtype)
        caches = k_cache.data_ptr(), v_cache.data_ptr(), k_cache.stride(0), v_cache.stride(0)
        is_int8 = v_cache.dtype is torch.int8
        tables = query_start.data_ptr(), seq_lens.data_ptr(), block_tables.data_ptr(), block_tables.stride(0)
        sizes = block_tables.shape[1], num_tokens, seq_lens.shape[0], num_heads, num_kv_heads, head_dim
        spans = variant.sliding_window or SEES_ALL, 0, variant.chunk_size or SEES_ALL
        sinks = 0 if variant.sinks is None else variant.sinks.data_ptr()
        slopes = 0 if variant.slopes is None else variant.slopes.data_ptr()
        changes = scale, variant.softcap or 0.0, sinks, slopes
        code, at, stride, to = DTYPE_CODES[query.dtype], query.data_ptr(), query.stride(0), out.data_ptr()
        self.native.paged_attention(
            code, at, stride, is_int8, *caches, *tables, *sizes, num_blocks, block_size, *spans, *changes, *NO_TERMS, to
        )
        return out

    def sample(self, logits: Tensor, how: SamplingTensors) -> Tensor:
        out = torch.empty(logits.shape[0], dtype=torch.int64)
        self.native.sample(sample_args(self.native, logits, how), out.data_ptr())
        return out

    def processed_logits(self, logits: Tensor, how: SamplingTensors, rows: Tensor) -> Tensor:
        out = empty((rows.shape[0], logits.shape[1]), torch.float32)
        args = sample_args(self.native, logits, how)
        self.native.processed_logits(args, rows.data_ptr(), rows.shape[0], out.data_ptr())
        return out

    def top_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor, normalized: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        count = rows.shape[0]
        ids = torch.empty(count, 1 + num_top, dtype=torch.int32)
        logprobs = torch.empty(count, 1 + num_top, dtype=torch.float32)
        ranks = torch.empty(count, dtype=torch.int32)
        given = (logits.data_ptr(), logits.stride(0), *logits.shape, rows.data_ptr(), token_ids.data_ptr(), count)
        self.native.top_logprobs(*given, num_top, normalized, ids.data_ptr(), logprobs.data_ptr(), ranks.data_ptr())
        return ids, logprobs, ranks

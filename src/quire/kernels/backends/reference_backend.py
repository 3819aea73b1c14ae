"""The reference kernels as a backend, of any torch device."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from quire.common.errors import ConfigError, KernelError
from quire.common.faults import fault_point
from quire.kernels.backends import key_layout, reference, reference_sampling
from quire.kernels.backends.recording import KernelGraph
from quire.kernels.backends.workspace import Workspace, zeroed_blocks
from quire.kernels.checks import check_range
from quire.kernels.sampling_tensors import SamplingTensors
from quire.kernels.weights import PackedWeight, QuantizedWeight


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
        return nullcontext() if count is None else _TorchThreads(count)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        fault_point("memory.workspace")
        return torch.empty(shape, dtype=dtype, device=self._device)

    def graph(self) -> KernelGraph:
        raise KernelError("the reference kernels cannot be recorded: a KernelGraph needs the native kernels")

    def zeroed_blocks(self, num_blocks: int, block_bytes: int) -> Tensor:
        return zeroed_blocks(num_blocks, block_bytes).to(self._device)

    def pack_weight(self, weight: Tensor) -> PackedWeight:
        data = weight.detach().clone(memory_format=torch.contiguous_format)
        n, k = weight.shape
        return PackedWeight(n, k, weight.dtype, data, data.data_ptr())

    def unpack_weight(self, packed: PackedWeight) -> Tensor:
        return packed.data.clone()

    def matmul(self, x: Tensor, packed: PackedWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
        return reference.matmul(x, packed.data, bias, out_dtype)

    def quantized_bytes(self, n: int, k: int, format: str) -> int:
        group = reference.group_size(k, format)
        return n * -(-k // group) * (group + 4)

    def mapped_weight(self, n: int, k: int, dtype: torch.dtype, format: str, data: Tensor) -> QuantizedWeight:
        raise KernelError("quantized weights that were saved need the native kernels, which are not in use")

    def quantize_weight(self, weight: Tensor, format: str) -> QuantizedWeight | None:
        if not bool(weight.isfinite().all()):
            return None
        n, k = weight.shape
        data, scales = reference.quantize_weight(weight, format)
        return QuantizedWeight(n, k, weight.dtype, format, data, data.data_ptr(), scales)

    def quantized_matmul(
        self, x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out_dtype: torch.dtype
    ) -> Tensor:
        assert weight.scales is not None
        return reference.quantized_matmul(x, weight.data, weight.scales, bias, out_dtype)

    def embedding(self, token_ids: Tensor, table: Tensor) -> Tensor:
        check_range("embedding: token id", token_ids, len(table))
        return reference.embedding(token_ids, table)

    def gather_packed(self, token_ids: Tensor, table: PackedWeight) -> Tensor:
        return self.embedding(token_ids, table.data)

    def gather_quantized(self, token_ids: Tensor, table: QuantizedWeight) -> Tensor:
        assert table.scales is not None
        rows = (table.data * table.scales[..., None]).flatten(1)[:, : table.k]
        return self.embedding(token_ids, rows.to(table.dtype))

    add = staticmethod(reference.add)
    rms_norm = staticmethod(reference.rms_norm)
    add_rms_norm = staticmethod(reference.add_rms_norm)
    layer_norm = staticmethod(reference.layer_norm)
    add_layer_norm = staticmethod(reference.add_layer_norm)
    activation = staticmethod(reference.activation)
    gated_activation = staticmethod(reference.gated_activation)

    def rotary_embedding(self, x: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        check_range("rotary_embedding: position", positions, len(cos_sin))
        reference.rotary_embedding(x, positions, cos_sin)

    def write_kv(self, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
        check_range("write_kv: slot", slots, _num_slots(v_cache))
        reference.write_kv(key, value, k_cache, v_cache, slots)

    def gather_kv(self, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        check_range("gather_kv: slot", slots, _num_slots(v_cache))
        return reference.gather_kv(k_cache, v_cache, slots)

    def copy_slots(self, k_cache: Tensor, v_cache: Tensor, src_slots: Tensor, dst_slots: Tensor) -> None:
        check_range("copy_slots: source slot", src_slots, _num_slots(v_cache))
        check_range("copy_slots: destination slot", dst_slots, _num_slots(v_cache))
        reference.copy_slots(k_cache, v_cache, src_slots, dst_slots)

    def copy_blocks(self, src: Tensor, dst: Tensor, pairs: Tensor) -> None:
        check_range("copy_blocks: source block", pairs[:, 0], len(src))
        check_range("copy_blocks: destination block", pairs[:, 1], len(dst))
        reference.copy_blocks(src, dst, pairs)

    def paged_attention(
        self,
        query: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        query_start: Tensor,
        seq_lens: Tensor,
        block_tables: Tensor,
        scale: float,
        sliding_window: int | None,
    ) -> Tensor:
        _check_attention(query, v_cache, query_start, seq_lens, block_tables, sliding_window)
        return reference.paged_attention(
            query, k_cache, v_cache, query_start, seq_lens, block_tables, scale, sliding_window
        )

    def sample(self, logits: Tensor, how: SamplingTensors) -> Tensor:
        _check_sampling(how, logits.shape[1])
        return reference_sampling.sample(logits, how)

    def processed_logits(self, logits: Tensor, how: SamplingTensors, rows: Tensor) -> Tensor:
        _check_sampling(how, logits.shape[1])
        check_range("processed_logits: row", rows, len(logits))
        return reference_sampling.processed_logits(logits, how, rows)

    def top_logprobs(
        self, logits: Tensor, token_ids: Tensor, num_top: int, rows: Tensor, normalized: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_range("top_logprobs: row", rows, len(logits))
        check_range("top_logprobs: token id", token_ids, logits.shape[1])
        return reference_sampling.top_logprobs(logits[rows], token_ids, num_top, normalized)


class _TorchThreads:
    """While it is entered, torch computes on this number of threads. That number is one for the whole process."""

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


def _num_slots(v_cache: Tensor) -> int:
    return v_cache.shape[0] * v_cache.shape[2]


def _check_attention(
    query: Tensor, v_cache: Tensor, query_start: Tensor, seq_lens: Tensor, block_tables: Tensor, window: int | None
) -> None:
    """Raise KernelError unless the ranges of queries and blocks fit. The native kernel checks this itself."""
    num_blocks, _, block_size, _ = v_cache.shape
    starts = query_start.tolist()
    if starts[0] != 0 or starts[-1] != len(query) or starts != sorted(starts):
        raise KernelError(f"paged_attention: query_start must rise from 0 to {len(query)}, it is {starts}")
    for s, seq_len in enumerate(seq_lens.tolist()):
        query_len = starts[s + 1] - starts[s]
        blocks = -(-seq_len // block_size)
        if query_len > seq_len or (query_len and blocks > block_tables.shape[1]):
            raise KernelError(
                f"paged_attention, sequence {s}: {query_len} query tokens of {seq_len} in all do not fit a block table "
                f"of {block_tables.shape[1]} blocks of {block_size}"
            )
        first_key = 0 if window is None else max(0, seq_len - query_len - window + 1)
        used = block_tables[s, first_key // block_size : blocks] if query_len else block_tables[s, :0]
        for block in used[(used < 0) | (used >= num_blocks)][:1].tolist():
            raise KernelError(f"paged_attention, sequence {s}: block id {block} is not in [0, {num_blocks})")


def _check_sampling(how: SamplingTensors, vocab: int) -> None:
    """Raise KernelError unless all values are in range. The native kernel checks this itself."""
    allowed = {
        "temperature": how.temperature >= 0,
        "top_k": how.top_k >= 0,
        "top_p": (how.top_p >= 0) & (how.top_p <= 1),
        "min_p": (how.min_p >= 0) & (how.min_p <= 1),
        "uniform": (how.uniform >= 0) & (how.uniform < 1),
    }
    if (c := how.changes) is not None:
        allowed["mask_of"] = (c.mask_of >= -1) & (c.mask_of < len(c.masks))
        allowed["history_of"] = (c.history_of >= -1) & (c.history_of < len(c.histories))
        allowed["repetition_penalty"] = c.penalties[:, 0] > 0
        lists = {"banned": c.banned, "biased": c.biased, "histories": c.histories}
        for name, given in lists.items():
            allowed[f"the starts of {name}"] = torch.cat((given.starts[:1] == 0, given.starts.diff() >= 0))
            allowed[f"the starts of {name}"][-1] &= given.starts[-1] == len(given.ids)
        lens = c.histories.starts.diff()
        allowed["num_prompt_tokens"] = (c.num_prompt_tokens >= 0) & (c.num_prompt_tokens <= lens)
    for name, fine in allowed.items():
        if not bool(fine.all()):
            raise KernelError(f"sample: {name} out of range in row {int(fine.int().argmin())}")
    for name, given in lists.items() if c is not None else ():
        check_range(f"sample: {name} has token id", given.ids, vocab)

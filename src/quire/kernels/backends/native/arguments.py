"""What the native extension takes in the place of tensors and names: addresses, sizes, strides and codes."""

from typing import Any

from torch import Tensor

from quire.kernels.backends import key_layout
from quire.kernels.checks import ACTIVATIONS, DTYPES
from quire.kernels.sampling.tensors import SamplingTensors
from quire.kernels.variants import XIELU, ActivationKind, DistanceTerms, EncoderVariant
from quire.kernels.weights import FORMATS

DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
"""The dtypes by their number in csrc/base/common.h."""

FORMAT_CODES = {format: code for code, format in enumerate(FORMATS)}
"""The formats of quantized weights by their number in csrc/quantized/layout.h."""
_ACTIVATION_CODES = {kind: (code, 0.0, 0.0, 0.0) for code, kind in enumerate(ACTIVATIONS)}
SEES_ALL = 2**63 - 1
"""The sliding window, or chunk, of layers without one."""


NO_TERMS = 0, 0, 0, 0, 0, 0
"""The RelativeTerms of attention without any."""


def encoder_changes(scale: float, variant: EncoderVariant, terms: DistanceTerms | None) -> tuple[Any, ...]:
    """The arguments of native.paged_attention from its spans on, up to the output."""
    window = SEES_ALL if variant.window is None else variant.window
    slopes = 0 if variant.slopes is None else variant.slopes.data_ptr()
    bias, bias_reach = (0, 0) if variant.bias is None else (variant.bias.data_ptr(), variant.bias.shape[1] // 2 - 8)
    spans = min(window, SEES_ALL - 1) + 1, window, SEES_ALL
    if terms is None:
        return *spans, scale, 0.0, 0, slopes, bias_reach, bias, 0, 0, 0, 0
    tables = [table for table in (terms.of_query, terms.of_key) if table is not None]
    of_query, of_key = (0 if table is None else table.data_ptr() for table in (terms.of_query, terms.of_key))
    reach = terms.term.shape[0] // 2
    if bias and bias_reach != reach:
        raise ValueError(f"encoder_attention: the bias reaches {bias_reach}, the terms {reach}: both must be the same")
    relative = reach, bias, of_query, of_key, terms.term.data_ptr(), tables[0].shape[2]
    return *spans, scale, 0.0, 0, slopes, *relative


def rows_of(x: Tensor) -> tuple[int, int]:
    """How many rows x has, and their width."""
    shape = x.shape
    width = shape[-1] if shape else 1
    return x.numel() // (width or 1), width


def place(out: Tensor) -> tuple[int, int, int]:
    """Where a product goes: address, distance of rows in elements, and dtype."""
    stride = out.shape[1] if out.is_contiguous() else out.stride(0)  # asking for a stride costs more than is_contiguous
    return out.data_ptr(), stride, DTYPE_CODES[out.dtype]


def activation_code(kind: ActivationKind) -> tuple[int, float, float, float]:
    """The kind's number in csrc/base/kernel_table.h, and its parameters in csrc/elementwise/activation.h's order."""
    if isinstance(kind, str):
        return _ACTIVATION_CODES[kind]
    if isinstance(kind, XIELU):
        return len(ACTIVATIONS), kind.alpha_p, kind.alpha_n, kind.beta
    return len(ACTIVATIONS) + 1, kind.limit, kind.alpha, 0.0


def cache_of(native: Any, k_cache: Tensor, v_cache: Tensor) -> Any:
    """native.KvCache: addresses, so the tensors must outlive it."""
    num_blocks, num_kv_heads, block_size, head_dim = v_cache.shape
    item = v_cache.element_size()
    k_block_bytes, v_block_bytes = k_cache.stride(0) * item, v_cache.stride(0) * item
    sizes = num_blocks, num_kv_heads, k_cache.shape[2] * key_layout.LANE_BYTES, head_dim * item, block_size
    return native.kv_cache(k_cache.data_ptr(), v_cache.data_ptr(), k_block_bytes, v_block_bytes, *sizes)


def sample_args(native: Any, logits: Tensor, how: SamplingTensors) -> Any:
    """native.SampleArgs: addresses, so the tensors must outlive it. Raises where values are out of range."""
    num_rows, vocab = logits.shape
    changes = None
    if (c := how.changes) is not None:
        lens = (c.masks.shape[0], c.banned.ids.shape[0], c.biased.ids.shape[0], len(c.histories))
        num_past = c.histories.ids.shape[0]
        changes = native.logit_changes(*[t.data_ptr() for t in c.tensors()], num_rows, *lens, num_past, vocab)
    cuts = how.top_k.data_ptr(), how.top_p.data_ptr(), how.min_p.data_ptr()
    per_row = how.temperature.data_ptr(), *cuts, how.uniform.data_ptr()
    return native.sample_args(logits.data_ptr(), logits.stride(0), num_rows, vocab, *per_row, changes)

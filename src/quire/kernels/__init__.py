"""One thin wrapper per kernel. `reference` defines what each computes; the native extension makes it fast."""

from quire.kernels.activation import activation, gated_activation
from quire.kernels.attention import paged_attention
from quire.kernels.backend import isa, num_threads, set_num_threads
from quire.kernels.embedding import embedding
from quire.kernels.graph import KernelGraph
from quire.kernels.kv_cache import copy_blocks, copy_slots, gather_kv, make_layer_cache, write_kv
from quire.kernels.matmul import PackedWeight, matmul, pack_weight, unpack_weight
from quire.kernels.norm import add, add_layer_norm, add_rms_norm, layer_norm, rms_norm
from quire.kernels.quantized import QUANTIZED_FORMATS, QuantizedWeight, mapped_weight, quantize_weight, quantized_bytes
from quire.kernels.rotary import rotary_embedding
from quire.kernels.sampling import processed_logits, sample, top_logprobs
from quire.kernels.sampling_tensors import LogitChanges, SamplingTensors, TokenLists
from quire.kernels.workspace import Workspace, borrowed

__all__ = [
    "QUANTIZED_FORMATS",
    "KernelGraph",
    "LogitChanges",
    "PackedWeight",
    "QuantizedWeight",
    "SamplingTensors",
    "TokenLists",
    "Workspace",
    "activation",
    "add",
    "add_layer_norm",
    "add_rms_norm",
    "borrowed",
    "copy_blocks",
    "copy_slots",
    "embedding",
    "gated_activation",
    "gather_kv",
    "isa",
    "layer_norm",
    "make_layer_cache",
    "mapped_weight",
    "matmul",
    "num_threads",
    "pack_weight",
    "paged_attention",
    "processed_logits",
    "quantize_weight",
    "quantized_bytes",
    "rms_norm",
    "rotary_embedding",
    "sample",
    "set_num_threads",
    "top_logprobs",
    "unpack_weight",
    "write_kv",
]

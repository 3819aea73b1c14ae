"""One thin wrapper per kernel. `reference` defines what each computes; the native extension makes it fast."""

from quire.kernels.attention import paged_attention
from quire.kernels.backend import isa, num_threads, set_num_threads
from quire.kernels.kv_cache import copy_blocks, copy_slots, gather_kv, make_layer_cache, write_kv
from quire.kernels.matmul import PackedWeight, matmul, pack_weight, unpack_weight
from quire.kernels.norm import rms_norm
from quire.kernels.sampling import sample

__all__ = [
    "PackedWeight",
    "copy_blocks",
    "copy_slots",
    "gather_kv",
    "isa",
    "make_layer_cache",
    "matmul",
    "num_threads",
    "pack_weight",
    "paged_attention",
    "rms_norm",
    "sample",
    "set_num_threads",
    "unpack_weight",
    "write_kv",
]

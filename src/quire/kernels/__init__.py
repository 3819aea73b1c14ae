"""One thin wrapper per kernel. `reference` defines what each computes; the native extension makes it fast."""

from quire.kernels.attention import paged_attention
from quire.kernels.backend import isa, num_threads, set_num_threads
from quire.kernels.kv_cache import copy_blocks, copy_slots, gather_kv, make_layer_cache, write_kv
from quire.kernels.norm import rms_norm
from quire.kernels.sampling import sample

__all__ = [
    "copy_blocks",
    "copy_slots",
    "gather_kv",
    "isa",
    "make_layer_cache",
    "num_threads",
    "paged_attention",
    "rms_norm",
    "sample",
    "set_num_threads",
    "write_kv",
]

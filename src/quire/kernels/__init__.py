"""One thin wrapper per kernel. `reference` defines what each computes; the native extension makes it fast."""

from quire.kernels.backend import isa, num_threads, set_num_threads
from quire.kernels.matmul import PackedWeight, matmul, pack_weight, unpack_weight
from quire.kernels.norm import rms_norm

__all__ = [
    "PackedWeight",
    "isa",
    "matmul",
    "num_threads",
    "pack_weight",
    "rms_norm",
    "set_num_threads",
    "unpack_weight",
]

"""One thin wrapper per kernel. `reference` defines what each computes; the native extension makes it fast."""

from quire.kernels.activation import activation, gated_activation
from quire.kernels.backend import isa, num_threads, set_num_threads
from quire.kernels.embedding import embedding
from quire.kernels.matmul import PackedWeight, matmul, pack_weight, unpack_weight
from quire.kernels.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from quire.kernels.rotary import rotary_embedding

__all__ = [
    "PackedWeight",
    "activation",
    "add_layer_norm",
    "add_rms_norm",
    "embedding",
    "gated_activation",
    "isa",
    "layer_norm",
    "matmul",
    "num_threads",
    "pack_weight",
    "rms_norm",
    "rotary_embedding",
    "set_num_threads",
    "unpack_weight",
]

"""One thin wrapper per kernel. `reference` defines what each computes; the native extension makes it fast."""

from quire.kernels.backend import isa, num_threads, set_num_threads
from quire.kernels.norm import rms_norm

__all__ = ["isa", "num_threads", "rms_norm", "set_num_threads"]

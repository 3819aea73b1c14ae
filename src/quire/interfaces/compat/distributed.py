"""vLLM's module of distributed execution, of which programs use one function to free memory."""

import gc

from quire.common.memory import give_back_memory


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give the memory of engines that are no longer used back to the system. There are no groups of processes to end,
    so `shutdown_ray` makes no difference."""
    gc.collect()
    give_back_memory()

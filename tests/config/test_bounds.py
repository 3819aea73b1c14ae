"""The first and the last value that each setting takes, and the error that names the setting beyond them."""

import pytest

from quire.common.errors import ConfigError
from quire.config.cache import CacheConfig
from quire.config.parallel import ParallelConfig
from quire.config.scheduler import SchedulerConfig


def cache(**changed):
    fields = {
        "block_size": 16, "kv_cache_bytes": None, "num_blocks_override": None, "memory_utilization": 0.9,
        "enable_prefix_caching": True,
    }  # fmt: skip
    return CacheConfig(**fields | changed)


def scheduler(**changed):
    return SchedulerConfig(**{"max_num_seqs": 8, "max_num_batched_tokens": 8} | changed)


def parallel(**changed):
    return ParallelConfig(**{"num_threads": None} | changed)


@pytest.mark.parametrize(
    ("make", "name", "values"),
    [
        (cache, "block_size", (1, 1024)),
        (cache, "memory_utilization", (1e-9, 1)),
        (cache, "pinned_fraction", (0, 0.999)),
        (cache, "num_blocks_override", (1, None)),
        (cache, "dtype", ("auto", "int8")),
        (scheduler, "max_num_seqs", (1,)),
        (scheduler, "max_num_batched_tokens", (1,)),
        (scheduler, "preemption_mode", ("swap", "recompute", None)),
        (scheduler, "priority_aging_s", (1e-6, 1e6, 5)),
        (scheduler, "prefix_max_delay_s", (0, 1e6)),
        (scheduler, "target_step_ms", (1e-6, 1e6, None)),
        (scheduler, "tenant_weights", ({"a": 1e-6, "b": 1e6},)),
        (parallel, "num_threads", (1, None)),
        (parallel, "tensor_parallel_size", (1, 64)),
        (parallel, "pipeline_parallel_size", (1, 64)),
        (parallel, "cpus", ((0, 1), ())),
    ],
)
def test_the_ends_of_a_range_are_in_it(make, name, values):
    for value in values:
        assert getattr(make(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("make", "name", "value", "message"),
    [
        (cache, "block_size", 0, "block_size=0: must be from 1 to 1024"),
        (cache, "block_size", 1025, "block_size=1025: must be from 1 to 1024"),
        (cache, "memory_utilization", 0, "gpu_memory_utilization=0: must be"),
        (cache, "memory_utilization", 1.001, "gpu_memory_utilization=1.001: must be"),
        (cache, "pinned_fraction", -0.001, "pinned_fraction=-0.001: must be"),
        (cache, "pinned_fraction", 1, "pinned_fraction=1: must be"),
        (cache, "num_blocks_override", 0, "num_gpu_blocks_override=0: must be at least 1"),
        (cache, "dtype", "int9", r"kv_cache_dtype='int9', did you mean 'int8'\? \(allowed: auto, int8\)"),
        (scheduler, "max_num_seqs", 0, "max_num_seqs=0: must be at least 1"),
        (scheduler, "max_num_batched_tokens", 0, "max_num_batched_tokens=0: must be at least 1"),
        (scheduler, "preemption_mode", "Swap", "preemption_mode='Swap': must be 'swap', 'recompute' or None"),
        (scheduler, "priority_aging_s", 0.9e-6, "priority_aging_s=9e-07: must be a number from 1e-06 to 1e.06"),
        (scheduler, "priority_aging_s", 1.1e6, "priority_aging_s=1100000.0: must be a number from 1e-06 to 1e.06"),
        (scheduler, "priority_aging_s", "1", "priority_aging_s='1': must be a number"),
        (scheduler, "prefix_max_delay_s", -1e-9, "prefix_max_delay_s=-1e-09: must be a number from 0 to 1e.06"),
        (scheduler, "prefix_max_delay_s", 1.1e6, "prefix_max_delay_s=1100000.0: must be a number from 0 to 1e.06"),
        (scheduler, "target_step_ms", 0, "target_step_ms=0: must be a number from 1e-06 to 1e.06"),
        (scheduler, "target_step_ms", 1.1e6, "target_step_ms=1100000.0: must be a number from 1e-06 to 1e.06"),
        (scheduler, "tenant_weights", {"a": 1, "b": 0}, r"tenant_weights\['b'\]=0: must be a number from 1e-06"),
        (scheduler, "tenant_weights", {"a": 2e6}, r"tenant_weights\['a'\]=2000000.0: must be a number from"),
        (parallel, "num_threads", 0, "num_threads=0: must be at least 1"),
        (parallel, "tensor_parallel_size", 0, "tensor_parallel_size=0: must be 1 to 64"),
        (parallel, "tensor_parallel_size", 65, "tensor_parallel_size=65: must be 1 to 64"),
        (parallel, "pipeline_parallel_size", 0, "pipeline_parallel_size=0: must be 1 to 64"),
        (parallel, "pipeline_parallel_size", 65, "pipeline_parallel_size=65: must be 1 to 64"),
    ],
)  # fmt: skip
def test_what_is_beyond_is_refused_by_name(make, name, value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        make(**{name: value})


def test_the_number_of_threads_follows_from_the_cpus_if_they_are_given():
    with pytest.raises(ConfigError, match=r"^num_threads and cpu_list both"):
        parallel(num_threads=1, cpus=(0,))

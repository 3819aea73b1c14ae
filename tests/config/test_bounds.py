"""The first and the last value that each setting takes, and the error that names the setting beyond them."""

import pytest

from quire.common.errors import ConfigError
from quire.config.cache import CacheConfig
from quire.config.parallel import NodesConfig, ParallelConfig, Shard, cut, divide_layers, key_heads, query_heads
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
        (parallel, "data_parallel_size", (1, 1024)),
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
        (scheduler, "max_num_batched_tokens", 2**31, "max_num_batched_tokens=2147483648: must be at"),
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
        (parallel, "num_threads", 0, "num_threads=0: must be 1 to 1024"),
        (parallel, "tensor_parallel_size", 0, "tensor_parallel_size=0: must be 1 to 64"),
        (parallel, "tensor_parallel_size", 65, "tensor_parallel_size=65: must be 1 to 64"),
        (parallel, "pipeline_parallel_size", 0, "pipeline_parallel_size=0: must be 1 to 64"),
        (parallel, "pipeline_parallel_size", 65, "pipeline_parallel_size=65: must be 1 to 64"),
        (parallel, "data_parallel_size", 0, "data_parallel_size=0: must be 1 to 1024"),
        (parallel, "data_parallel_size", 1025, "data_parallel_size=1025: must be 1 to 1024"),
        (parallel, "enable_expert_parallel", True, "enable_expert_parallel=True: experts are divided"),
    ],
)  # fmt: skip
def test_what_is_beyond_is_refused_by_name(make, name, value, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        make(**{name: value})


def test_the_number_of_threads_follows_from_the_cpus_if_they_are_given():
    with pytest.raises(ConfigError, match=r"^num_threads and cpu_list both"):
        parallel(num_threads=1, cpus=(0,))


def machines(num_ranks=None, **changed):
    fields = {"nnodes": 2, "node_rank": 0, "host": "a", "port": 1, "secret_file": None}
    return NodesConfig(**fields | changed, num_ranks=num_ranks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data_parallel_size": 2, "nodes": machines()}, "data_parallel_size=2: only one engine can have nnodes=2"),
        ({"backend": "ray", "nodes": machines()}, "nnodes=2: Ray chooses the nodes .* leave it at 1"),
    ],
)
def test_what_cannot_be_combined_is_refused_by_name(given, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        parallel(**given)


@pytest.mark.parametrize(
    "given",
    [
        {"nodes": machines(), "data_parallel_size": 1},
        {"backend": "ray", "data_parallel_size": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 3},
        {"backend": "mp", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    ],
)
def test_what_can_be_combined_is_taken(given):
    assert parallel(**given) == parallel(**given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "in_process"),
        ({"tensor_parallel_size": 2}, "ranks"),
        ({"pipeline_parallel_size": 2}, "pipeline"),
        ({"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, "pipeline"),
        ({"executor": "own", "pipeline_parallel_size": 2}, "own"),
    ],
)
def test_the_executor_follows_from_the_processes(given, name):
    assert parallel(**given).executor_name == name


@pytest.mark.parametrize(
    ("nodes", "stages", "num_machines", "ranks"),
    [
        (None, ((0, 2), (2, 4), (4, 5)), 1, 4),
        (machines(), ((4, 5),), 1, 4),
        (machines(4), ((4, 5),), 2, 2),
    ],
)
def test_stages_and_ranks_of_a_machine(nodes, stages, num_machines, ranks):
    config = parallel(tensor_parallel_size=4, stages=((0, 2), (2, 4), (4, 5)), nodes=nodes)
    assert config.own_stages == stages
    assert (config.num_machines, config.own_ranks) == (num_machines, ranks)
    assert range(config.own_ranks) == range(ranks), "a whole number"


def test_machines_are_connected_once_or_also_for_what_ranks_gather():
    assert (machines().num_connections, machines(4).num_connections) == (1, 2)
    assert (machines(host="b", port=7).master_addr, machines(nnodes=3).nnodes) == ("b:7", 3)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((2, 1, "a:7", "secret", 2), (2, 1, "a", 7, "secret", None)),
        ((2, 1, "X.org:7", None, 1, 2), (2, 1, "X.org", 7, None, 2)),
        ((3, 2, "a", None, 3, 2), (3, 2, "a", 29501, None, None)),
        ((2, 0, "[::1]:65535", None, 1, 4), (2, 0, "::1", 65535, None, 4)),
        ((2, 0, "a:1", None, 2, 4), (2, 0, "a", 1, None, None)),
    ],
)
def test_machines_are_read_from_the_arguments(args, expected):
    assert NodesConfig.read(*args) == NodesConfig(*expected)
    assert NodesConfig.read(1, 0, *args[2:]) is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 0, None, None, 1), "nnodes=0, node_rank=0: must be 1 or more, and 0 to nnodes - 1"),
        ((2, 2, "a", None, 2), "nnodes=2, node_rank=2: must be 1 or more, and 0 to nnodes - 1"),
        ((2, -1, "a", None, 2), "nnodes=2, node_rank=-1: must be 1 or more, and 0 to nnodes - 1"),
        ((2, 0, "a", None, 1), "nnodes=2 needs pipeline_parallel_size=2, or 1 and a tensor_parallel_size"),
        ((2, 0, "a", None, 1, 1), "nnodes=2 needs .* given: pipeline_parallel_size=1 and tensor_parallel_size=1$"),
        ((2, 0, "a", None, 1, 3), "nnodes=2 needs .* a multiple of 2; given: .* tensor_parallel_size=3"),
        ((2, 0, "a", None, 4, 2), "nnodes=2 needs .* pipeline_parallel_size=4 and tensor_parallel_size=2"),
        ((2, 0, None, None, 2), "nnodes=2: master_addr=None must be HOST:PORT of machine 0"),
        ((2, 0, "a:", None, 2), "nnodes=2: master_addr='a:' must be HOST:PORT of machine 0"),
        ((2, 0, "a:0", None, 2), "nnodes=2: master_addr='a:0' must be HOST:PORT of machine 0"),
        ((2, 0, "a:65536", None, 2), "nnodes=2: master_addr='a:65536' must be HOST:PORT of machine 0"),
    ],
)
def test_machines_that_do_not_fit_are_refused(args, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        NodesConfig.read(*args)


@pytest.mark.parametrize(
    ("size", "unit", "num_ranks", "sizes"),
    [
        (4, 32, 4, (1, 1, 1, 1)),
        (100, 32, 2, (64, 36)),
        (96, 32, 2, (64, 32)),
        (96, 32, 3, (32, 32, 32)),
        (64, 32, 3, (32, 16, 16)),
        (65, 32, 3, (32, 32, 1)),
        (7, 2, 4, (2, 2, 2, 1)),
        (7, 3, 5, (2, 2, 1, 1, 1)),
        (7, 3, 3, (3, 3, 1)),
    ],
)
def test_columns_of_each_rank(size, unit, num_ranks, sizes):
    found = cut(size, unit, num_ranks)
    assert found == sizes
    assert {type(part) for part in found} == {int}, "which can be a slice's end"


def test_fewer_columns_than_ranks_are_refused():
    message = "^tensor_parallel_size=5: a layer has only 4 columns or heads to be divided: at most 4$"
    with pytest.raises(ConfigError, match=message):
        cut(4, 32, 5)


@pytest.mark.parametrize(
    ("sizes", "num_stages", "stages"),
    [
        ([1, 1, 1, 1], 2, ((0, 2), (2, 4))),
        ([5, 1, 1, 1], 2, ((0, 1), (1, 4))),
        ([1, 1, 1, 5], 2, ((0, 3), (3, 4))),
        ([0, 0, 9], 3, ((0, 1), (1, 2), (2, 3))),
        ([9, 0, 0], 3, ((0, 1), (1, 2), (2, 3))),
        ([3], 1, ((0, 1),)),
        ([4, 4, 4, 4, 4, 4], 3, ((0, 2), (2, 4), (4, 6))),
    ],
)
def test_layers_of_each_stage(sizes, num_stages, stages):
    assert divide_layers(sizes, num_stages) == stages


def test_fewer_layers_than_stages_are_refused():
    message = "^pipeline_parallel_size=3: the model has 2 layers, and a stage at least one: at most 2$"
    with pytest.raises(ConfigError, match=message):
        divide_layers([1, 1], 3)


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "num_ranks", "keys", "queries"),
    [
        (8, 8, 2, [(0, 4), (4, 8)], [(0, 4), (4, 8)]),
        (6, 3, 2, [(0, 2), (2, 3)], [(0, 4), (4, 6)]),
        (8, 2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)], [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (6, 2, 3, [(0, 1), (0, 1), (1, 2)], [(0, 2), (2, 3), (3, 6)]),
        (2, 1, 2, [(0, 1), (0, 1)], [(0, 1), (1, 2)]),
    ],
)
def test_heads_of_each_rank(heads, key_value_heads, num_ranks, keys, queries):
    ranks = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    assert [key_heads(key_value_heads, rank) for rank in ranks] == keys
    assert [query_heads(heads, key_value_heads, rank) for rank in ranks] == queries
    assert query_heads(heads, key_value_heads, Shard()) == (0, heads)


def test_fewer_heads_than_ranks_are_refused():
    message = "^tensor_parallel_size=5: a layer has 4 attention heads, 2 for each of 2 heads .*: at most 4$"
    with pytest.raises(ConfigError, match=message):
        query_heads(4, 2, Shard(0, 5))

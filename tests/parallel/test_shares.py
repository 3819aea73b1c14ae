"""How columns, heads, CPUs and memory are divided among ranks, and what is refused in one line before weights load."""

import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import ConfigError, EngineArgs, SamplingParams
from quire.cli import main
from quire.common.errors import OutOfMemoryError
from quire.config.kv_cache import AttentionSpec, LatentSpec, attention_spec
from quire.config.kv_layout import kv_cache_config
from quire.config.parallel import NodesConfig, ParallelConfig, Shard, cut, divide_layers, key_heads, query_heads
from quire.engine.routing.replicas import replica_args
from quire.runner.memory_plan import plan_memory
from quire.runner.parallel import executor, placing
from quire.runner.parallel.pipeline.planning import stage_configs
from quire.runner.parallel.placing import move_thread, rank_threads
from tests.kernels.isas import needs_native
from tests.parallel.ranks import of_ranks
from tests.speculation import heads


def shards(num_ranks: int) -> list[Shard]:
    return [Shard(rank, num_ranks) for rank in range(num_ranks)]


@given(st.integers(1, 5000), st.integers(1, 64))
def test_columns_are_divided_in_whole_panels_and_nearly_equal(size: int, num_ranks: int) -> None:
    if size < num_ranks:
        with pytest.raises(ConfigError, match=f"^tensor_parallel_size={num_ranks}: .* only {size} columns"):
            cut(size, 32, num_ranks)
        return
    sizes = cut(size, 32, num_ranks)
    assert sum(sizes) == size
    assert min(sizes) > 0
    unit = next(unit for unit in (32, 16, 8, 4, 2, 1) if all(s % unit == 0 for s in sizes[:-1]))
    assert max(sizes) - min(sizes) < 2 * unit
    assert unit == 32 or -(-size // (2 * unit)) < num_ranks


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 40))
def test_each_head_of_queries_is_in_one_rank_with_the_keys_that_it_reads(keys: int, each: int, num_ranks: int) -> None:
    try:
        queries = [query_heads(keys * each, keys, shard) for shard in shards(num_ranks)]
    except ConfigError as error:
        assert num_ranks > keys and f"{keys * each} attention heads" in str(error)  # noqa: PT017, PT018
        return
    assert [head for start, end in queries for head in range(start, end)] == list(range(keys * each))
    for (start, end), shard in zip(queries, shards(num_ranks), strict=True):
        first, last = key_heads(keys, shard)
        assert start < end
        assert {head // each for head in range(start, end)} == set(range(first, last))
        assert last - first == 1 or (end - start) == (last - first) * each


def test_blocks_of_all_ranks_are_those_of_one_and_the_heads_that_are_kept_twice() -> None:
    specs = [attention_spec(2, 64, "bfloat16"), attention_spec(2, 64, "bfloat16", 128), LatentSpec(64, 16, "float32")]
    one = kv_cache_config(specs, 16, num_blocks=8)
    two, three = (dataclasses.replace(one, num_ranks=num_ranks) for num_ranks in (2, 3))
    latents = 16 * 80 * 4
    assert (one.block_bytes, two.block_bytes) == (2 * 2 * 16 * 64 * 2, 2 * latents)
    assert three.block_bytes == 3 * latents
    assert two.bytes_per_token == one.bytes_per_token + 80 * 4
    parts = [three.of_rank(shard) for shard in shards(3)]
    assert {part.num_ranks for part in parts} == {1}
    heads = [
        group.spec.num_kv_heads for part in parts for group in part.groups if isinstance(group.spec, AttentionSpec)
    ]
    assert heads == [1] * len(heads)
    assert kv_cache_config(specs, 16, num_bytes=6 * latents, num_ranks=2).num_blocks == 3


@given(st.lists(st.integers(0, 100), min_size=1, max_size=40), st.integers(1, 12))
def test_stages_are_contiguous_and_about_equal_in_bytes(sizes: list[int], num_stages: int) -> None:
    if len(sizes) < num_stages:
        message = f"^pipeline_parallel_size={num_stages}: the model has {len(sizes)} layers, .* at most {len(sizes)}$"
        with pytest.raises(ConfigError, match=message):
            divide_layers(sizes, num_stages)
        return
    stages = divide_layers(sizes, num_stages)
    assert [layer for first, end in stages for layer in range(first, end)] == list(range(len(sizes)))
    assert len(stages) == num_stages
    if all(size > sum(sizes) / num_stages / 4 for size in sizes):  # where each stage gets several layers anyway
        assert all(end > first for first, end in stages)
    if len(set(sizes)) == 1:
        assert max(end - first for first, end in stages) - min(end - first for first, end in stages) <= 1


def test_a_stage_keeps_its_layers_of_each_block() -> None:
    window, full, draft = (attention_spec(n, 64, "bfloat16", w) for n, w in ((2, 128), (2, None), (1, None)))
    whole = kv_cache_config([window, full] * 3, 16, num_blocks=8, draft_specs=[draft])
    stages = ((0, 1), (1, 4), (4, 6))
    parts = [whole.of_stage(layers) for layers in stages]
    assert [[group.layer_ids for group in part.groups] for part in parts] == [[(0,), ()], [(1,), (0, 2)], [(0,), (1,)]]
    assert [[len(group.draft_specs) for group in part.groups] for part in parts] == [[0, 0], [0, 0], [0, 1]]
    layer = 16 * 2 * 2 * 64 * 2
    assert [part.block_bytes for part in parts] == [layer, 2 * layer, 3 * layer // 2]
    together = dataclasses.replace(whole, stages=stages)
    assert together.block_bytes == sum(part.block_bytes for part in parts)
    assert together.bytes_per_token == whole.bytes_per_token
    assert dataclasses.replace(together, num_ranks=2, stages=stages[:2]).block_bytes == 3 * layer


@pytest.mark.parametrize(
    ("num_ranks", "given", "expected"),
    [
        (1, {}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, {}, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (2, {"num_threads": 1}, [(0, 1), (2, 3)]),
        (1, {"num_threads": 5}, [5, 5]),
        (1, {"nodes": NodesConfig(2, 0, "127.0.0.1", 1, None), "cpus": (1, 2)}, [None, (1, 2)]),
        (1, {"nodes": NodesConfig(2, 0, "127.0.0.1", 1, None), "num_threads": 3}, [None, 3]),
    ],
)
def test_stages_of_one_machine_have_cpus_of_their_own(
    num_ranks: int, given: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(placing, "neighbours_first", sorted)
    monkeypatch.setattr(placing, "cpu_quota", lambda root: None)
    parallel = ParallelConfig(
        given.pop("num_threads", None), num_ranks, pipeline_parallel_size=2, stages=((0, 3), (3, 6)), **given
    )
    config = dataclasses.replace(EngineArgs(speculative_config={"model": "quire-draft"}).resolve(), parallel=parallel)
    stages = stage_configs(config)
    assert [stage.parallel.cpus or stage.parallel.num_threads for stage in stages] == expected
    assert [stage.model.layers for stage in stages] == [(0, 3), (3, 6)]
    assert [stage.draft is None for stage in stages] == [True, False]
    assert {(stage.parallel.executor_name, stage.parallel.nodes) for stage in stages} == {
        ("in_process" if num_ranks == 1 else "ranks", None)
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pipeline_parallel_size": 7}, "the model has 6 layers, and a stage at least one: at most 6"),
        ({"runner": "pooling"}, "models that pool texts .runner='pooling'. run in one process each; leave it at 1"),
        ({"model_impl": "transformers"}, "modules of transformers .model_impl='transformers'. run in one process each"),
        ({"weights_from_file": "always"}, "weights that stay in a file .weights_from_file='always'. run in one"),
    ],
)
def test_what_stages_cannot_do_is_refused(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    args = {"pipeline_parallel_size": 2, "num_threads": 1, **given}
    if "weights_from_file" in given:
        args["model"] = str(tmp_path / "saved")
        assert main(["quantize", "quire-tiny", args["model"], "--quantization", "int8"]) == 0
    with pytest.raises(
        ConfigError, match=f"^pipeline_parallel_size={args['pipeline_parallel_size']}: {message}"
    ) as refused:
        plan_memory(EngineArgs(**args))
    assert "\n" not in str(refused.value)


def test_draft_heads_cannot_be_divided(tmp_path: Path) -> None:
    head = str(heads.write(tmp_path, heads.eagle(), heads.EAGLE_NAMES))
    with pytest.raises(ConfigError, match=r"^pipeline_parallel_size=2: a draft head .* reads hidden states of several"):
        plan_memory(EngineArgs(pipeline_parallel_size=2, num_threads=1, speculative_config={"model": head}))


def test_stages_need_a_cpu_for_each_of_their_ranks() -> None:
    message = "^tensor_parallel_size=2 and pipeline_parallel_size=2, together 4 ranks need a CPU each, and "
    with pytest.raises(ConfigError, match=message):
        plan_memory(EngineArgs(tensor_parallel_size=2, pipeline_parallel_size=2, cpu_list="0"))


@needs_native
def test_the_plan_counts_the_stages_of_this_machine() -> None:
    given: dict[str, Any] = {"num_threads": 1, "max_model_len": 64, "num_gpu_blocks_override": 40}
    one, two = (plan_memory(EngineArgs(**given, pipeline_parallel_size=number)) for number in (1, 2))
    assert one.weight_bytes < two.weight_bytes < 1.5 * one.weight_bytes  # both have the tied table
    assert one.kv_cache.total_bytes == two.kv_cache.total_bytes
    assert two.rank_bytes == -(-two.total_bytes // 2)
    assert (two.to_dict()["pipeline_parallel_size"], two.to_dict()["stages"]) == (2, ((0, 4), (4, 6)))
    assert "\nstages      2, of the layers 0 to 3, 4 to 5\n" in str(two)
    assert "\nranks       2 processes, in which all this is counted; each needs about " in str(two)
    machines = plan_memory(EngineArgs(**given, pipeline_parallel_size=2, nnodes=2, master_addr="127.0.0.1"))
    assert machines.weight_bytes < one.weight_bytes
    assert machines.kv_cache.total_bytes == one.kv_cache.total_bytes // 3
    assert machines.activation_bytes < two.activation_bytes
    assert "4 to 5; this machine has the last" in str(machines)
    assert "processes" not in str(machines)
    with pytest.raises(OutOfMemoryError):
        plan_memory(EngineArgs(**given, pipeline_parallel_size=2, memory_limit=one.total_bytes))


@pytest.mark.parametrize(
    ("num_cpus", "quota", "given", "expected"),
    [
        (8, None, {}, [(0, 1, 2), (3, 4, 5), (6, 7)]),
        (8, None, {"num_threads": 2}, [(0, 1), (2, 3), (4, 5)]),
        (8, None, {"num_threads": 3}, [3, 3, 3]),
        (8, None, {"cpus": (1, 3, 5, 7)}, [(1, 3), (5,), (7,)]),
        (8, 4.0, {}, [2, 1, 1]),
        (2, None, {"num_threads": 1}, [1, 1, 1]),
        (6, None, {"num_threads": 1, "pins_ranks": False}, [1, 1, 1]),
    ],
)
def test_ranks_have_cpus_of_their_own(
    num_cpus: int, quota: Any, given: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cpus)), raising=False)
    monkeypatch.setattr(placing, "neighbours_first", sorted)
    monkeypatch.setattr(placing, "cpu_quota", lambda root: quota)
    parallel = ParallelConfig(**{"num_threads": None, "tensor_parallel_size": 3} | given)
    found = [rank_threads(parallel, shard) for shard in shards(3)]
    assert [each.cpus or each.num_threads for each in found] == expected


def test_a_thread_is_moved_to_the_cpus_of_its_rank_and_not_bound_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[Any]()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: calls.append((pid, set(cpus))), raising=False)
    move_thread((2, 3))
    assert calls == [(0, {2, 3}), (0, {0, 1, 2, 3})]

    def refuse(pid: int, cpus: Any) -> None:
        raise OSError("not allowed")

    monkeypatch.setattr(os, "sched_setaffinity", refuse, raising=False)
    move_thread((2, 3))


def test_rank_0_steps_on_its_own_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = list[tuple[int, ...]]()
    monkeypatch.setattr(placing, "neighbours_first", lambda cpus: [6, 7])
    monkeypatch.setattr(placing, "cpu_quota", lambda root: None)
    monkeypatch.setattr(executor, "move_thread", moved.append)
    for how, expected in [({}, {(6,)}), ({"cpu_list": "any"}, set[Any]())]:
        moved.clear()
        of_ranks(2, [[5, 6, 7]], [SamplingParams(max_tokens=3)], model="quire-tiny", max_model_len=64, **how)
        assert set(moved) == expected


def test_engines_of_several_ranks_get_cpus_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr("quire.engine.routing.replicas.cpu_quota", lambda: None)
    engines = replica_args(EngineArgs(data_parallel_size=2, tensor_parallel_size=2))
    assert [len(engine.cpu_list.split(",")) for engine in engines if engine.cpu_list] == [4, 4]
    with pytest.raises(ConfigError, match="2 engines of 6 threads need 12 CPUs, and 8 are available"):
        replica_args(EngineArgs(data_parallel_size=2, tensor_parallel_size=2, num_threads=3))


@needs_native
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensor_parallel_size": 6, "num_threads": 1}, "a layer has 4 attention heads, 2 for each of 2 heads of keys"),
        ({"tensor_parallel_size": 64}, " ranks need a CPU each, and [0-9]+ are available: lower it, or let ranks"),
        ({"tensor_parallel_size": 3, "cpu_list": "0"}, " ranks need a CPU each, and 1 are available"),
        ({"runner": "pooling"}, "models that pool texts .runner='pooling'. run in one process each; leave it at 1"),
        ({"model_impl": "transformers"}, "modules of transformers .model_impl='transformers'. run in one"),
    ],
)
def test_what_ranks_cannot_do_is_refused(given: dict[str, Any], message: str) -> None:
    args = {"tensor_parallel_size": 2, **({} if "tensor_parallel_size" in given else {"num_threads": 1}), **given}
    with pytest.raises(
        ConfigError, match=f"^tensor_parallel_size={args['tensor_parallel_size']}.*{message}"
    ) as refused:
        plan_memory(EngineArgs(**args))
    assert "\n" not in str(refused.value)


@needs_native
def test_the_plan_counts_all_ranks_and_says_what_one_needs() -> None:
    given: dict[str, Any] = {"num_threads": 1, "max_model_len": 64, "num_gpu_blocks_override": 40}
    one, two = (plan_memory(EngineArgs(**given, tensor_parallel_size=num_ranks)) for num_ranks in (1, 2))
    assert one.weight_bytes < two.weight_bytes < 1.1 * one.weight_bytes
    assert one.kv_cache.total_bytes == two.kv_cache.total_bytes
    assert one.activation_bytes < two.activation_bytes < 2.1 * one.activation_bytes
    assert two.rank_bytes == -(-two.total_bytes // 2)
    assert two.to_dict()["tensor_parallel_size"] == 2
    assert "\nranks       2 processes, in which all this is counted; each needs about " in str(two)
    assert "ranks" not in str(one)
    with pytest.raises(OutOfMemoryError):
        plan_memory(EngineArgs(**given, tensor_parallel_size=2, memory_limit=one.total_bytes))

"""The memory plan: what fits is worked out before a weight is read, and what does not is refused by number."""

from dataclasses import dataclass

import pytest

from quire.common.errors import CheckpointError, ConfigError, OutOfMemoryError
from quire.config.args import EngineArgs
from quire.config.kv_cache import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.config.kv_layout import group_layers, kv_cache_config
from quire.config.machine import MachineMemory
from quire.models.families.llama import LlamaForCausalLM
from quire.runner import memory_plan
from quire.runner.memory_plan import plan_memory

FULL = FullAttentionSpec(2, 64, "bfloat16")
WINDOW = SlidingWindowSpec(2, 64, "bfloat16", sliding_window=128)
MIB = 1024**2


@pytest.mark.parametrize(
    ("specs", "sizes"),
    [
        ([FULL] * 6, [6]),
        ([WINDOW] * 6, [6]),
        ([FULL] * 3 + [WINDOW] * 3, [3, 3]),
        ([FULL, WINDOW, WINDOW, WINDOW, WINDOW, WINDOW], [1] * 6),
        ([FULL] * 2 + [WINDOW] * 5, [2, 2, 2, 1]),
    ],
)
def test_layers_are_grouped_by_what_they_need(specs, sizes):
    groups = group_layers(specs, 16)
    assert [len(g.layer_ids) for g in groups] == sizes
    assert sorted(i for g in groups for i in g.layer_ids) == list(range(len(specs)))
    assert all(specs[i] == g.spec for g in groups for i in g.layer_ids)


def test_layers_of_unequal_bytes_per_token_share_the_bytes_of_a_block():
    wide = FullAttentionSpec(4, 64, "bfloat16")
    config = kv_cache_config([FULL] * 6 + [wide] * 6, 16, num_blocks=20)
    assert [(len(group.layer_ids), group.spec) for group in config.groups] == [(6, FULL), (3, wide), (3, wide)]
    assert {group.block_bytes(16) for group in config.groups} == {config.block_bytes} == {6 * 16 * 512}
    narrow = FullAttentionSpec(1, 2, "bfloat16")
    uneven = kv_cache_config([FULL] * 2 + [narrow], 16, num_bytes=MIB)
    assert [len(group.layer_ids) for group in uneven.groups] == [1, 1, 1]
    assert uneven.block_bytes == 16 * 512, "of the largest group"


def test_the_cache_fills_the_bytes_given():
    config = kv_cache_config([FULL] * 6, 16, num_bytes=10 * MIB)
    assert config.total_bytes <= 10 * MIB < config.total_bytes + config.block_bytes
    assert config.max_tokens == config.num_blocks * 16


def test_groups_share_the_tokens_of_a_cache():
    config = kv_cache_config([FULL, WINDOW], 16, num_blocks=9)
    assert config.max_tokens == 4 * 16


def test_the_plan_of_the_embedded_checkpoint_adds_up():
    plan = plan_memory(EngineArgs(kv_cache_memory="12MiB"))
    assert plan.kv_cache.total_bytes == 12 * MIB
    assert plan.max_model_len == 2048
    assert plan.weight_bytes == pytest.approx(13.6e6, rel=0.01)
    assert plan.max_concurrency == pytest.approx(4096 / 2048)
    assert plan.to_dict()["num_blocks"] == 256
    for word in ("weights", "KV cache", "12.00 MiB", "activations", "context"):
        assert word in str(plan)


def test_a_model_of_windows_alone_is_planned_by_the_blocks_that_a_sequence_holds(monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "kv_cache_specs", lambda _: [WINDOW, WINDOW])
    monkeypatch.setattr(memory_plan, "activation_bytes", lambda *_: 0)  # the model itself has other layers
    plan = plan_memory(EngineArgs(kv_cache_memory="12MiB", max_num_batched_tokens=64))
    # (128 - 1 + 64) // 16 + 3 = 14 blocks of 2 layers of 8 KiB
    assert plan.kv_cache.num_blocks == 12 * MIB // (2 * 16 * 512) == 768
    assert "768 blocks of 16, in bfloat16; a sequence holds at most 14, however long it is" in str(plan)
    assert f"2048 tokens, {768 / 14:.1f} such sequences at once" in str(plan)
    assert plan.to_dict()["kv_cache_tokens"] is None


def test_an_int8_cache_holds_nearly_twice_the_tokens():
    plans = {
        dtype: plan_memory(EngineArgs(kv_cache_memory="12MiB", kv_cache_dtype=dtype)) for dtype in ("auto", "int8")
    }
    assert plans["int8"].kv_cache.total_bytes == pytest.approx(12 * MIB, rel=0.01)
    assert plans["int8"].kv_cache.max_tokens == pytest.approx(4096 * 2 * 64 / (64 + 4), rel=0.01)
    assert plans["int8"].to_dict()["kv_cache_dtype"] == "int8"
    assert [spec.dtype for spec in {group.spec for group in plans["auto"].kv_cache.groups}] == ["bfloat16"]


def test_an_int8_cache_needs_heads_of_whole_lanes(monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "kv_cache_specs", lambda _: [FullAttentionSpec(2, 6, "bfloat16")])
    monkeypatch.setattr(memory_plan, "activation_bytes", lambda *_: 0)  # the model itself has other heads
    assert plan_memory(EngineArgs(kv_cache_memory="12MiB")).kv_cache.num_blocks > 0
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8'.* 6 dimensions.* multiple of 4"):
        plan_memory(EngineArgs(kv_cache_memory="12MiB", kv_cache_dtype="int8"))


@dataclass(frozen=True, slots=True)
class StateSpec(KVCacheSpec):
    """One state of 1 KiB for a whole sequence, and no keys and values."""

    def block_bytes(self, block_size):
        return 1024

    def max_blocks(self, num_tokens, block_size, max_chunk):
        return 1


def test_the_dtype_of_the_cache_changes_only_layers_with_keys_and_values(monkeypatch):
    monkeypatch.setattr(LlamaForCausalLM, "kv_cache_specs", lambda _: [FULL, StateSpec()])
    monkeypatch.setattr(memory_plan, "activation_bytes", lambda *_: 0)  # the model itself has other layers
    plan = plan_memory(EngineArgs(kv_cache_memory="12MiB", kv_cache_dtype="int8"))
    assert [group.spec for group in plan.kv_cache.groups] == [FullAttentionSpec(2, 64, "int8"), StateSpec()]


def test_a_small_cache_shortens_the_context_unless_a_length_was_asked_for():
    for length in (None, "auto"):
        assert plan_memory(EngineArgs(num_gpu_blocks_override=6, max_model_len=length)).max_model_len == 96
    with pytest.raises(OutOfMemoryError, match=r"max_model_len=97 .* 96 tokens"):
        plan_memory(EngineArgs(num_gpu_blocks_override=6, max_model_len=97))


def test_no_memory_for_one_block_is_refused_with_both_numbers():
    with pytest.raises(OutOfMemoryError, match=r"1\.00 KiB is too little .* 48\.00 KiB"):
        plan_memory(EngineArgs(kv_cache_memory="1KiB"))


def test_a_cache_larger_than_the_machine_is_refused():
    with pytest.raises(OutOfMemoryError, match="lower kv_cache_memory"):
        plan_memory(EngineArgs(kv_cache_memory="900TiB"))


def test_where_activations_do_not_fit_the_error_names_what_makes_them_smaller():
    with pytest.raises(OutOfMemoryError, match="lower max_num_batched_tokens and max_num_seqs"):
        plan_memory(EngineArgs(memory_limit="30MiB"))
    plan = plan_memory(EngineArgs(memory_limit="30MiB", max_num_batched_tokens=512, max_num_seqs=8))
    assert plan.total_bytes <= 30 * MIB


def test_swap_space_is_part_of_the_plan():
    plan = plan_memory(EngineArgs(kv_cache_memory="12MiB", swap_space=0.09375))
    assert plan.kv_cache.host_bytes == 96 * MIB
    assert "swap space" in str(plan)
    assert plan.to_dict()["swap_bytes"] == 96 * MIB
    for size in ("1MiB", None):
        with pytest.raises(OutOfMemoryError, match=r"swap_space of 976.56 TiB do not fit"):
            plan_memory(EngineArgs(swap_space=1e6, kv_cache_memory=size))


def test_without_a_size_the_cache_takes_what_is_left_but_what_may_grow_under_load(monkeypatch):
    monkeypatch.setattr(memory_plan, "machine_memory", lambda: MachineMemory(600 * MIB, 500 * MIB))
    assert 435 * MIB < plan_memory(EngineArgs()).total_bytes <= 436 * MIB
    assert 499 * MIB < plan_memory(EngineArgs(memory_limit="500MiB")).total_bytes <= 500 * MIB
    monkeypatch.setattr(memory_plan, "machine_memory", lambda: MachineMemory(64 * MIB, 50 * MIB))
    plan = plan_memory(EngineArgs())
    left = 50 * MIB - plan.weight_bytes - plan.activation_bytes
    assert left // 4 - plan.kv_cache.block_bytes < plan.kv_cache.total_bytes <= left // 4
    plan = plan_memory(EngineArgs(max_model_len=2048))  # which needs more than that
    assert plan.kv_cache.total_bytes == 128 * plan.kv_cache.block_bytes
    monkeypatch.setattr(memory_plan, "machine_memory", lambda: MachineMemory(16 * MIB, 16 * MIB))
    with pytest.raises(OutOfMemoryError):
        plan_memory(EngineArgs())


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"block_size": "16B"}, "block_size='16B'.*int"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens=-1"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0: must be 1 to 64"),
        ({"num_threads": 0}, "num_threads=0"),
        ({"swap_space": -1}, "swap_space=-1"),
        ({"swap_space": float("nan")}, "swap_space=nan"),
        ({"swap_space": float("inf")}, "swap_space=inf"),
        ({"swap_space": 10**400}, "swap_space=1000"),
        ({"swap_space": 1e308}, r"swap_space=1e\+308"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization=nan"),
        ({"scheduling_policy": "fcsf"}, "scheduling_policy='fcsf', did you mean 'fcfs'"),
        ({"target_step_ms": 0}, "target_step_ms=0"),
        ({"priority_aging_s": -1.0}, "priority_aging_s=-1"),
        ({"prefix_max_delay_s": float("nan")}, "prefix_max_delay_s=nan"),
        ({"tenant_weights": {"a": 0}}, r"tenant_weights\['a'\]=0"),
        ({"tenant_weights": "a=1"}, "tenant_weights='a=1'"),
        ({"pinned_fraction": 1}, "pinned_fraction=1"),
        ({"preemption_mode": "never"}, "preemption_mode='never'"),
        ({"max_model_len": 0}, "max_model_len=0"),
        ({"max_model_len": 5000}, "2048 positions"),
        ({"max_model_len": "long"}, "max_model_len='long'"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory='lots'"),
        ({"kv_cache_memory": 1, "num_gpu_blocks_override": 1}, "give one"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override=0"),
        ({"dtype": "float8"}, "float8"),
        ({"kv_cache_dtype": "int4"}, r"kv_cache_dtype='int4', did you mean 'int8'\? \(allowed: auto, int8\)"),
        ({"kv_cache_dtype": None}, "kv_cache_dtype=None"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args, message):
    with pytest.raises(ConfigError, match=message):
        plan_memory(EngineArgs(**args))


def test_an_unknown_argument_suggests_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        EngineArgs(max_num_seq=4)


def test_a_missing_model_is_a_checkpoint_error(tmp_path):
    with pytest.raises(CheckpointError, match="nothing"):
        plan_memory(EngineArgs(model=str(tmp_path / "nothing")))


def test_a_memory_limit_holds_for_all_together():
    plan = plan_memory(EngineArgs(memory_limit="100MiB"))
    assert 99 * MIB < plan.total_bytes <= 100 * MIB
    assert plan.machine.limit_bytes == 100 * MIB
    assert plan.total_bytes == plan.weight_bytes + plan.activation_bytes + plan.kv_cache.total_bytes
    for limit, others in (("20MiB", {}), ("60MiB", {"kv_cache_memory": "64MiB"}), ("60MiB", {"swap_space": 0.1})):
        with pytest.raises(OutOfMemoryError, match="the memory_limit of"):
            plan_memory(EngineArgs(memory_limit=limit, **others))
    with pytest.raises(ConfigError, match="memory_limit='much'"):
        plan_memory(EngineArgs(memory_limit="much"))


def test_a_limit_is_never_more_than_the_machine_has():
    machine = MachineMemory(100, 50)
    assert machine.limited(None) is machine
    assert machine.limited(70) == MachineMemory(70, 50)
    assert machine.limited(20) == MachineMemory(20, 20)
    assert machine.limited(200) == machine


def test_plans_of_several_engines_leave_room_for_their_processes():
    machine = MachineMemory(4096 * MIB, 3000 * MIB)
    assert machine.for_plans(0.9, num_new=2) == 2488 * MIB
    assert machine.for_plans(0.5, num_new=2) == 2048 * MIB
    assert machine.for_plans(0.9, num_new=1, used_bytes=500 * MIB) == 3244 * MIB
    assert machine.for_plans(0.9, num_new=11) == 750 * MIB

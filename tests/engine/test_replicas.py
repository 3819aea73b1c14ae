"""Several engines of one machine get disjoint CPUs and equal parts of the memory."""

import os
from pathlib import Path
from typing import Any

import pytest

from quire import ConfigError, EngineArgs
from quire.config import machine as machine_config
from quire.config.machine import MachineMemory, cpu_quota, neighbours_first
from quire.engine.routing import replicas
from quire.engine.routing.replicas import check_one_engine, replica_args


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Eight CPUs without known neighbours, 1,000 bytes, no quota, and processes that need no memory by themselves."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(replicas, "machine_memory", lambda: MachineMemory(1000, 800))
    monkeypatch.setattr(machine_config, "ENGINE_BYTES", 0)
    monkeypatch.setattr(replicas, "cpu_quota", lambda: None)
    monkeypatch.setattr(machine_config, "_CPUS", tmp_path)
    return tmp_path


def parts(**kwargs: Any) -> list[tuple[Any, ...]]:
    made = replica_args(EngineArgs(**kwargs))
    assert all(args.data_parallel_size == 1 for args in made)
    return [(args.cpu_list, args.num_threads, args.memory_limit) for args in made]


def test_one_engine_keeps_its_arguments() -> None:
    args = EngineArgs(num_threads=3)
    assert replica_args(args) == [args]
    check_one_engine(args)


def test_cpus_and_memory_are_divided() -> None:
    assert parts(data_parallel_size=2) == [("0,1,2,3", None, 400), ("4,5,6,7", None, 400)]
    assert parts(data_parallel_size=3) == [("0,1", None, 266), ("2,3", None, 266), ("4,5", None, 266)]
    assert parts(data_parallel_size=2, num_threads=1, memory_limit=500) == [("0", None, 250), ("1", None, 250)]
    assert parts(data_parallel_size=2, cpu_list="7,3-5", gpu_memory_utilization=0.5) == [
        ("3,4", None, 250), ("5,7", None, 250),
    ]  # fmt: skip


def test_the_memory_of_processes_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_config, "ENGINE_BYTES", 100)
    assert [limit for _, _, limit in parts(data_parallel_size=2)] == [300, 300]


def test_below_a_quota_threads_are_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "cpu_quota", lambda: 4.5)
    assert parts(data_parallel_size=2) == [(None, 2, 400), (None, 2, 400)]
    monkeypatch.setattr(replicas, "cpu_quota", lambda: 16.0)
    assert parts(data_parallel_size=2) == [("0,1,2,3", None, 400), ("4,5,6,7", None, 400)]


def test_where_no_thread_may_be_pinned_engines_have_a_number_of_threads() -> None:
    assert parts(data_parallel_size=2, cpu_list="any") == [("any", 4, 400), ("any", 4, 400)]
    assert parts(data_parallel_size=2, tensor_parallel_size=2, cpu_list="any")[0] == ("any", 2, 400)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"data_parallel_size": 9},
            "data_parallel_size=9 engines of 1 threads need 9 CPUs, and 8 are available: lower",
        ),
        ({"data_parallel_size": 2, "num_threads": 5}, "2 engines of 5 threads need 10 CPUs, and 8 are available"),
        ({"data_parallel_size": 2, "cpu_list": "3"}, "2 engines of 1 threads need 2 CPUs, and 1 are available"),
        ({"data_parallel_size": 4, "memory_limit": 3}, "memory_limit=3 B: too little for 4 engines"),
    ],
)
def test_what_does_not_fit_is_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replica_args(EngineArgs(**kwargs))


@pytest.mark.parametrize("number", [0, 1025])
def test_a_number_of_engines_out_of_bounds_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"data_parallel_size={number}: must be 1 to 1024"):
        EngineArgs(data_parallel_size=number).resolve()


def test_where_one_engine_is_wanted_several_are_refused() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size=2: this is one engine; use LLM or AsyncLLM"):
        check_one_engine(EngineArgs(data_parallel_size=2))


def test_cpus_of_a_node_and_of_a_core_lie_together(machine: Path) -> None:
    for cpu in range(8):  # two nodes that alternate, siblings four apart
        folder = machine / f"cpu{cpu}"
        (folder / f"node{cpu % 2}").mkdir(parents=True)
        (folder / "nodes").mkdir()
        (folder / "topology").mkdir()
        (folder / "topology/core_id").write_text(f"{cpu % 4}\n", encoding="ascii")
    assert neighbours_first(set(range(8))) == [0, 4, 2, 6, 1, 5, 3, 7]
    (machine / "cpu6/topology/core_id").write_text("none", encoding="ascii")
    assert neighbours_first((0, 2, 4, 6)) == [0, 4, 6, 2]


def test_cores_of_two_packages_that_share_a_node_are_kept_apart(machine: Path) -> None:
    for cpu in range(16):  # two packages, the second one of two dies; siblings eight apart
        (folder := machine / f"cpu{cpu}/topology").mkdir(parents=True)
        (folder / "core_id").write_text(f"{cpu % 2}\n", encoding="ascii")
        (folder / "physical_package_id").write_text(f"{cpu // 4 % 2}\n", encoding="ascii")
        if cpu % 8 >= 4:
            (folder / "die_id").write_text(f"{cpu // 2 % 2}\n", encoding="ascii")
    assert neighbours_first(set(range(16)) - {2, 3, 10, 11}) == [0, 8, 1, 9, 4, 12, 5, 13, 6, 14, 7, 15]


def test_the_quota_of_control_groups_is_the_lowest(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/outer/inner\n", encoding="ascii")
    inner = tmp_path / "sys/fs/cgroup/outer/inner"
    inner.mkdir(parents=True)
    assert cpu_quota(tmp_path) is None
    (inner / "cpu.max").write_text("max 100000\n", encoding="ascii")
    assert cpu_quota(tmp_path) is None
    (inner.parent / "cpu.max").write_text("250000 100000\n", encoding="ascii")
    assert cpu_quota(tmp_path) == 2.5
    (inner / "cpu.max").write_text("150000 100000\n", encoding="ascii")
    assert cpu_quota(tmp_path) == 1.5
    (inner / "cpu.max").write_text("50000 100000\n", encoding="ascii")
    assert cpu_quota(tmp_path) == 0.5
    for no_limit in ("50000 0", "0 100000", "-1 100000", "50000", f"1{'0' * 400} 1"):
        (inner / "cpu.max").write_text(no_limit, encoding="ascii")
        assert cpu_quota(tmp_path) == 2.5


def test_the_quota_of_version_1_is_that_of_the_cpu_controller(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("4:memory:/other\n3:cpu,cpuacct:/outer/inner\n", encoding="ascii")
    inner = tmp_path / "sys/fs/cgroup/cpu/outer/inner"
    inner.mkdir(parents=True)
    for folder, quota in ((inner, -1), (inner.parent, 150_000), (inner.parent.parent, 400_000)):
        (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n", encoding="ascii")
        (folder / "cpu.cfs_period_us").write_text("100000\n", encoding="ascii")
    assert cpu_quota(tmp_path) == 1.5

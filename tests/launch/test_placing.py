"""Where engines run: what is refused before anything starts, and the clocks of other machines."""

import asyncio
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from quire import LLM, ConfigError, EngineArgs, LLMEngine
from quire.common.outputs import EngineStats, RequestMetrics
from quire.engine.process.messages import Abort, AddMany, AddPooling, AddRequest, Progress, RequestDelta, StepDone
from quire.interfaces.launch import placing
from quire.interfaces.launch.clocks import shifted
from quire.interfaces.launch.placing import place
from quire.interfaces.launch.ray_cluster import LOCAL, RayCluster, share_of_nodes
from tests.ports import free_port

RAY: dict[str, Any] = {"distributed_executor_backend": "ray"}


def engines(number: int, num_stages: int = 1, num_ranks: int = 1, num_threads: int | None = None) -> EngineArgs:
    return EngineArgs(
        **RAY,
        data_parallel_size=number,
        pipeline_parallel_size=num_stages,
        tensor_parallel_size=num_ranks,
        num_threads=num_threads,
    )


@pytest.mark.parametrize(
    ("nodes", "args", "share"),
    [
        ([8], engines(1), 8),
        ([8], engines(3), 2),
        ([8, 8], engines(2), 8),
        ([0, 4, 6], engines(2), 4),
        ([0, 4, 6], engines(3), 3),
        ([1, 1], engines(2), 1),
        ([4, 4], engines(3, num_threads=2), 2),
        ([8], engines(2, num_ranks=2), 2),
        ([3, 3], engines(2, num_ranks=2), 1),
        ([8, 8], engines(1, num_stages=2), 8),
        ([9], engines(1, num_stages=2), 4),
        ([0, 8, 5], engines(2, num_stages=2, num_ranks=2), 1),
        ([8, 8], engines(1, num_stages=2, num_ranks=4, num_threads=2), 2),
    ],
)
def test_ranks_get_the_largest_equal_number_of_cpus(nodes: list[int], args: EngineArgs, share: int) -> None:
    assert share_of_nodes(nodes, args) == share


@pytest.mark.parametrize(
    ("nodes", "args", "numbers"),
    [
        ([1, 1], engines(3), "data_parallel_size=3 engines of 1 threads need 3 CPUs, .* have 1 [+] 1: add nodes"),
        ([3, 3], engines(2, num_threads=4), "2 engines of 4 threads need 8 CPUs, .* have 3 [+] 3: add nodes, or lower"),
        ([], engines(1), "need 1 CPUs, .* have none: add nodes, or lower data_parallel_size or num_threads$"),
        (
            [1, 1],
            engines(1, num_ranks=2),
            "=1 engines of 2 ranks of 1 threads need 2 CPUs, each 2 on one node, and the nodes .* have 1 [+] 1: add "
            "nodes, or lower data_parallel_size, tensor_parallel_size or num_threads$",
        ),
        (
            [4, 4],
            engines(2, num_stages=3, num_threads=2),
            "=2 engines of 3 stages of 2 threads need 12 CPUs, and the nodes .* have 4 [+] 4: .*, pipeline_parallel_",
        ),
        (
            [6, 3],
            engines(1, num_stages=2, num_ranks=2, num_threads=2),
            "=1 engines of 2 stages of 2 ranks of 2 threads need 8 CPUs, each 4 on one node, .* have 6 [+] 3: ",
        ),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_the_numbers(nodes: list[int], args: EngineArgs, numbers: str) -> None:
    with pytest.raises(ConfigError, match=numbers) as refused:
        share_of_nodes(nodes, args)
    assert "\n" not in str(refused.value)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables that this process may change."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    monkeypatch.setattr(os, "environ", variables)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return variables


def test_without_ray_one_line_says_what_to_install(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(placing.RayCluster, "_reserve", None)
    monkeypatch.delitem(sys.modules, "ray")
    monkeypatch.setattr(sys, "meta_path", [_NoRay(), *sys.meta_path])
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'quire\[ray\]'"):
        LLM(**RAY)
    assert environment["RAY_AUTH_MODE"] == "token"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64


class _NoRay:
    """Finds no module of Ray, even where it is installed."""

    def find_spec(self, name: str, *_: Any) -> None:
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:{}", r"ray_address='127\.0\.0\.1:\d+' does not answer: .*refused; start Ray there"),
        ("there", "ray_address='there': must be HOST:PORT, or auto"),
        ("127.0.0.1:99999999", "does not answer"),
        ("ray://127.0.0.1:10001", "connections through a Ray client are not supported; start this program on a node"),
    ],
)
@pytest.mark.parametrize("by", ["argument", "variable"])
def test_an_address_that_cannot_be_used_is_refused(
    environment: dict[str, str], address: str, message: str, by: str
) -> None:
    address = address.format(free_port())
    if by == "variable":
        environment["RAY_ADDRESS"] = address
    with pytest.raises(ConfigError, match=message):
        place(EngineArgs(**RAY, ray_address=address if by == "argument" else None))


def test_ray_that_was_imported_too_early_is_refused(environment: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has read its settings already, and would listen on every address."""
    module = ModuleType("ray")
    module.is_initialized = lambda: False  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    with pytest.raises(ConfigError, match="ray was imported before Quire could set it up"):
        place(EngineArgs(**RAY))
    assert environment.keys().isdisjoint(LOCAL)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"distributed_executor_backend": "rays"}, r"distributed_executor_backend='rays', did you mean 'ray'\?"),
        ({"ray_address": "auto"}, "ray_address='auto' requires distributed_executor_backend='ray'"),
        ({"ray_address": "auto", "data_parallel_backend": "mp"}, "requires distributed_executor_backend='ray'"),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**given).resolve()


def test_vllms_names_of_backends() -> None:
    assert EngineArgs(data_parallel_backend="ray").resolve().parallel.backend == "ray"
    assert EngineArgs(distributed_executor_backend="uni").resolve().parallel.backend == "uni"
    assert EngineArgs().resolve().parallel.backend == "mp"
    assert not EngineArgs(distributed_executor_backend="mp").has_own_processes


def test_an_engine_in_this_process_is_not_rays() -> None:
    with pytest.raises(ConfigError, match="distributed_executor_backend='ray': this is an engine in this process"):
        LLMEngine.from_args(EngineArgs(**RAY))
    with pytest.raises(ConfigError, match="cpu_list='0': Ray chooses"):
        place(EngineArgs(**RAY, cpu_list="0"))


class FakeCluster:
    """As RayCluster, with two engines on one node and one on another."""

    num_threads = 3

    @classmethod
    def place(cls, args: EngineArgs) -> "FakeCluster":
        assert args.data_parallel_size == 3
        return cls()

    def parts_beside(self) -> list[int]:
        return [2, 2, 1]

    async def launch(self, number: int, args: EngineArgs) -> tuple[int, float]:
        return number, args.gpu_memory_utilization

    def close(self) -> None: ...


def test_engines_share_the_memory_of_their_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(placing, "RayCluster", FakeCluster)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    args = EngineArgs(**RAY, data_parallel_size=3, model="model", gpu_memory_utilization=0.8, memory_limit="3GiB")
    parts = [part for part, _ in place(args).engines]
    assert [part.gpu_memory_utilization for part in parts] == [0.4, 0.4, 0.8]
    assert {part.memory_limit for part in parts} == {2**30}
    assert {part.model for part in parts} == {str(tmp_path / "model")}, "other nodes have other folders"
    assert {part.num_threads for part in parts} == {3}
    assert {part.cpu_list for part in parts} == {"any"}, "ranks of two engines would be pinned to the same CPUs"
    assert not any(part.has_own_processes for part in parts)
    assert [asyncio.run(launch()) for _, launch in place(args).engines] == [(0, 0.4), (1, 0.4), (2, 0.8)]
    parts = [part for part, _ in place(replace(args, model="org/name", memory_limit=None)).engines]
    assert {(part.model, part.memory_limit) for part in parts} == {("org/name", None)}
    assert place(replace(args, pipeline_parallel_size=2)).engines[0][0].memory_limit == 2**29, "each stage has a part"


def test_a_draft_models_folder_is_the_same_for_engines_on_other_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placing, "RayCluster", FakeCluster)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "draft").mkdir()
    for given, found in (("draft", str(tmp_path / "draft")), ("org/name", "org/name")):
        drafting = {"model": given, "num_speculative_tokens": 2}
        part = place(EngineArgs(**RAY, data_parallel_size=3, speculative_config=drafting)).engines[0][0]
        assert part.speculative_config == {"model": found, "num_speculative_tokens": 2}


@pytest.mark.parametrize(
    ("nodes", "num_stages", "beside"),
    [("abc", 1, [1, 1, 1]), ("aab", 1, [2, 2, 1]), ("abab", 2, [2, 2]), ("abca", 2, [2, 2]), ("abcd", 2, [1, 1])],
)
def test_the_fullest_node_of_an_engine_counts(
    nodes: str, num_stages: int, beside: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("ray.util.placement_group")
    module.placement_group_table = lambda group: group  # type: ignore[attr-defined]
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    table = {"bundles_to_node_id": dict(enumerate(nodes))}
    args = engines(len(nodes) // num_stages, num_stages)
    assert RayCluster(table, args, 1, owns_connection=False).parts_beside() == beside


def test_machines_are_not_given_with_ray() -> None:
    given: dict[str, Any] = {"pipeline_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1:1"}
    with pytest.raises(ConfigError, match=r"nnodes=2: Ray chooses the nodes of an engine's stages .* leave it at 1"):
        EngineArgs(**RAY, **given).resolve()


METRICS = RequestMetrics(1.0, 2.0, None, 4.0, num_preemptions=1)
MOVED = RequestMetrics(11.0, 12.0, None, 14.0, num_preemptions=1)
STATS = EngineStats(**dict.fromkeys(EngineStats.__dataclass_fields__, 0))


def add(at: float, metrics: RequestMetrics | None) -> AddRequest:
    progress = None if metrics is None else Progress(metrics, 3, [1])
    return AddRequest(1, "r", [1], "", at, False, b"\x80", progress)  # type: ignore[arg-type]


def pooling(at: float) -> AddPooling:
    return AddPooling(1, "r", [1], "", at, None)  # type: ignore[arg-type]


def done(metrics: RequestMetrics) -> StepDone:
    return StepDone([RequestDelta(1, [], False), RequestDelta(2, [], True, metrics=metrics)], STATS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (add(1.0, None), add(11.0, None)),
        (add(1.0, METRICS), add(11.0, MOVED)),
        (pooling(1.0), pooling(11.0)),
        (AddMany([pooling(1.0), pooling(2.0)]), AddMany([pooling(11.0), pooling(12.0)])),
        (done(METRICS), done(MOVED)),
        (Abort(["r"]), Abort(["r"])),
    ],
)
def test_times_are_those_of_the_other_clock(before: Any, after: Any) -> None:
    assert shifted(before, 10.0) == after
    assert shifted(after, -10.0) == before
    assert shifted(before, 0.0) is before

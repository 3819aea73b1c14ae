"""Clusters of Ray on this machine. `make cluster` runs these tests, with Ray in an environment of its own."""

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.interfaces.launch.ray_cluster import LOCAL
from tests.async_llm import door

# Ray reads its settings when it is imported.
os.environ.update({**LOCAL, "RAY_AUTH_TOKEN": secrets.token_hex(32), "QUIRE_CLUSTER_TEST": secrets.token_hex(8)})
os.environ.update(RAY_worker_register_timeout_seconds="180", RAY_agent_register_timeout_ms="180000")
pytest.importorskip("ray", reason="Ray is not installed: make cluster")
WAIT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray's own warnings are not ours."""
    for item in items:
        if "tests/cluster" in str(item.path):
            item.add_marker(pytest.mark.filterwarnings("default"))


def until(condition: Callable[[], Any], what: str, limit_s: float = WAIT_S) -> None:
    """Wait for what another process does."""
    ends_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < ends_s, what
        time.sleep(0.05)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def processes() -> dict[int, str]:
    """The processes of Ray and of engines that this one has started, by id, without those that end with the tests."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            pid, command = int(path.name), (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            mine = f"QUIRE_CLUSTER_TEST={os.environ['QUIRE_CLUSTER_TEST']}".encode()
            is_mine = mine in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if is_mine and pid != os.getpid() and command and "tests.forks.server" not in command:
            found[pid] = command
    return found


def start(make: Callable[[], Any], num_cpus: int) -> Any:
    """Start the nodes. Ray gives a node 30 seconds, which a busy machine may need more than once."""
    for attempt in range(3):
        nodes = make()
        try:
            nodes.add_node(num_cpus=0, include_dashboard=False)
            for _ in range(2):
                nodes.add_node(num_cpus=num_cpus)
            return nodes
        except Exception:
            nodes.shutdown()
            for pid in processes():
                os.kill(pid, signal.SIGKILL)
            if attempt == 2:
                raise


@pytest.fixture(scope="session", autouse=True)
def settings() -> Iterator[None]:
    """More time than without Ray; and nothing may be left of a cluster."""
    door.LIMIT_S, before = WAIT_S, door.LIMIT_S
    yield
    door.LIMIT_S = before
    try:
        until(lambda: not processes(), "processes are left behind", 30)
    finally:
        for pid in processes():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def cluster(settings: None, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A head node without CPUs, and two nodes of one CPU each, or of the module's NUM_CPUS."""
    import ray
    from ray.cluster_utils import Cluster

    nodes = start(Cluster, getattr(request.module, "NUM_CPUS", 1))
    try:
        yield nodes
    finally:
        ray.shutdown()
        nodes.shutdown()

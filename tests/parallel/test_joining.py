"""Machines that join late or again: links that break meanwhile, a machine 0 that sleeps, and what is each one's own."""

import fcntl
import os
import resource
import shutil
import socket
import struct
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs
from quire.config.args import EngineConfig
from quire.config.checkpoint.location import EMBEDDED_CHECKPOINTS, EMBEDDED_ROOT
from quire.runner.memory_plan import plan_memory
from quire.runner.parallel.machines import node, nodes
from quire.runner.parallel.machines.node import Own, on_this_machine, part_of
from quire.runner.parallel.machines.nodes import admit, join
from quire.runner.parallel.machines.secret import secret_of
from quire.runner.parallel.messages import Connection, readable
from tests.kernels.isas import needs_native
from tests.parallel.test_nodes import HOST, PORT, WEIGHTS, InThread, close, machine, secret
from tests.ports import free_port

__all__ = ["secret"]
OF_RANKS: dict[str, Any] = {"nnodes": 2, "tensor_parallel_size": 2, "master_addr": HOST}


def end_with_a_reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def test_a_machine_whose_connection_ends_before_it_has_joined_tries_again(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does if machine 0 ends meanwhile, or sends it away because many others ask."""
    monkeypatch.setattr(nodes, "_RETRY_S", 0.01)
    with socket.create_server((HOST, PORT)) as server:
        joining = InThread(lambda: join(machine(1, secret), WEIGHTS))
        for end in (socket.socket.close, end_with_a_reset):
            end(server.accept()[0])
    close(*admit(machine(0, secret), WEIGHTS)[0], joining.result())


def test_a_machine_that_has_ended_when_the_last_one_joins_is_waited_for(secret: Path) -> None:
    master = InThread(lambda: admit(machine(0, secret, nnodes=3), WEIGHTS))
    end_with_a_reset(join(machine(1, secret, nnodes=3), WEIGHTS))
    other = join(machine(2, secret, nnodes=3), WEIGHTS)
    again = join(machine(1, secret, nnodes=3), WEIGHTS)
    accepted = [sock for (sock,) in master.result()]
    assert [each.getpeername() for each in accepted] == [again.getsockname(), other.getsockname()]
    close(again, other, *accepted)


def test_a_machine_that_joins_again_waits_as_long_as_machine_0_sleeps(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_waited = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(nodes, "JOIN_S", 0.0)
        patch.setattr(nodes, "_RETRY_S", 0.01)
        patch.setattr(nodes.logger, "warning", lambda *said: has_waited.set() if said[1] == "" else None)
        joining = InThread(lambda: join(machine(1, secret), WEIGHTS, is_again=True))
        assert has_waited.wait(60)
    close(*admit(machine(0, secret), WEIGHTS)[0], joining.result())


def test_a_machine_that_has_joined_once_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = list[bool]()

    def joined(*_: Any, is_again: bool) -> socket.socket:
        again.append(is_again)
        return socket.socket()

    monkeypatch.setattr(node, "join", joined)
    monkeypatch.setattr(node, "start_child", lambda *_: subprocess.Popen(["true"]))
    run = part_of(EngineArgs(**OF_RANKS, node_rank=1))
    run()
    run()
    assert again == [False, False, True, True]


def test_machines_join_at_an_ipv6_address(secret: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    there = {"host": "::1", "port": free_port()}
    master = InThread(lambda: admit(machine(0, secret, **there), WEIGHTS))
    sock = join(machine(1, secret, **there), WEIGHTS)
    ((accepted,),) = master.result()
    assert accepted.getpeername() == sock.getsockname()
    close(sock, accepted)


def test_a_program_with_many_open_files_waits_for_sockets_too() -> None:
    ours, its = socket.socketpair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    try:
        high = socket.socket(fileno=fcntl.fcntl(ours, fcntl.F_DUPFD, 2000))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with ours, its, high:
        assert not Connection(high).is_readable(0.0)
        its.sendall(b"x")
        assert Connection(high).is_readable(60.0)
        assert readable([its, high], 60.0) == [high]


def on_machine_1(at_0: dict[str, Any], at_1: dict[str, Any]) -> EngineConfig:
    """The config of machine 0, as a machine with other arguments runs it."""
    plan = plan_memory(EngineArgs(**OF_RANKS, **at_0, num_threads=1, num_gpu_blocks_override=8))
    config = EngineArgs(**OF_RANKS, **at_1, num_threads=1, node_rank=1).resolve()
    assert config.parallel.nodes is not None
    return on_this_machine(plan.config, plan.kv_cache, Own.of(config, config.parallel.nodes))


@needs_native
def test_each_machine_says_whether_its_threads_are_pinned() -> None:
    assert not on_machine_1({}, {"cpu_list": "any"}).parallel.pins_ranks
    assert on_machine_1({"cpu_list": "any"}, {}).parallel.pins_ranks


@needs_native
def test_a_draft_model_is_where_each_machine_has_it(tmp_path: Path) -> None:
    for name in EMBEDDED_CHECKPOINTS:
        shutil.copytree(EMBEDDED_ROOT / name, tmp_path / name)
    model, draft = (tmp_path / name for name in EMBEDDED_CHECKPOINTS)

    def path_of_draft(of_0: str, **at_1: Any) -> Path:
        config = on_machine_1(
            {"speculative_config": {"method": "draft_model", "model": of_0}}, {"model": str(model), **at_1}
        )
        assert config.model.path == model
        assert config.draft is not None
        return config.draft.path

    assert path_of_draft("quire-draft", speculative_config={"model": str(draft)}) == draft
    assert path_of_draft("quire-draft") == EMBEDDED_ROOT / "quire-draft"
    assert path_of_draft("quire-tiny") == model, "it is the model itself"


def test_a_secret_may_be_any_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_bytes(b" \xff\n")
    monkeypatch.setenv("QUIRE_MASTER_SECRET", os.fsdecode(b"\xff\n"))
    assert secret_of(machine(1)) == secret_of(machine(1, tmp_path / "secret")) == b"\xff"

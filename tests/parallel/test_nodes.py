"""Several machines, as loopback addresses: who may join, what is refused in one line, and links that break."""

import dataclasses
import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import LLM, ConfigError, EngineArgs
from quire.cli import main
from quire.config.model import ModelConfig
from quire.config.parallel import NodesConfig
from quire.runner.parallel.machines import nodes
from quire.runner.parallel.machines.node import run_node
from quire.runner.parallel.machines.nodes import Hello, Welcome, admit, fingerprint, join
from quire.runner.parallel.messages import Connection, to_frame
from tests.async_llm.door import Door

HOST = f"127.{os.getpid() >> 14 & 255}.{os.getpid() >> 7 & 127}.{1 + (os.getpid() & 127)}"
"""An address of this process alone, so that tests beside it can use the same port."""
PORT = 29501
WEIGHTS = "0123"


def machine(rank: int, secret_file: Path | None = None, **given: Any) -> NodesConfig:
    secret = None if secret_file is None else str(secret_file)
    return dataclasses.replace(NodesConfig(2, rank, HOST, PORT, secret), **given)


def close(*socks: socket.socket) -> None:
    for sock in socks:
        sock.close()


class InThread(threading.Thread):
    """Calls a function, and keeps what it returns or raises."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except Exception as error:
            self._result = error

    def result(self) -> Any:
        self.join(60)
        return self._result


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    return secret_of(tmp_path / "secret", "swordfish\n")


def secret_of(path: Path, content: str) -> Path:
    path.write_text(content)
    path.chmod(0o600)
    return path


def test_machines_that_have_the_secret_join_and_it_does_not_cross_the_wire(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = list[bytes]()
    send = Connection.send_frame
    monkeypatch.setattr(Connection, "send_frame", lambda self, frame: (sent.append(frame), send(self, frame))[1])
    three = {"nnodes": 3}
    master = InThread(lambda: admit(machine(0, secret, **three), WEIGHTS))
    socks = [join(machine(rank, secret, **three), WEIGHTS) for rank in (2, 1)]
    accepted = master.result()
    assert [[sock.getpeername()] for sock in reversed(socks)] == [
        [sock.getsockname() for sock in each] for each in accepted
    ]
    assert len([frame for frame in sent if b"Beat" not in frame]) == 6  # ranks of another test may beat meanwhile
    assert not any(b"swordfish" in frame for frame in sent)
    close(*socks, *[sock for each in accepted for sock in each])


def test_what_follows_the_handshake_at_once_is_not_lost(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_more(self: Connection, message: Any) -> None:
        frame = to_frame(message)
        self.send_frame(frame + b"more" if isinstance(message, Welcome) else frame)

    monkeypatch.setattr(Connection, "send", with_more)
    master = InThread(lambda: admit(machine(0, secret), WEIGHTS))
    with join(machine(1, secret), WEIGHTS) as sock:
        assert sock.recv(4) == b"more"
        close(*master.result()[0])


@pytest.mark.parametrize(
    ("given", "weights", "message"),
    [
        (
            {"secret_file": None},
            WEIGHTS,
            "its secret is another one; give all the same in --master-secret-file",
        ),
        ({"nnodes": 3}, WEIGHTS, "it was started with nnodes=3, and machine 0 with 2"),
        ({"num_ranks": 4}, WEIGHTS, "it divides 4 ranks among machines, and machine 0 stages; give all the same --"),
        ({"node_rank": 2}, WEIGHTS, "node_rank=2 must be 1 to 1"),
        ({}, "4567", "its weights, their quantization or the model's config.json differ from machine 0's"),
    ],
)
def test_a_machine_that_differs_is_refused_and_the_next_one_joins(
    given: dict[str, Any], weights: str, message: str, secret: Path
) -> None:
    master = InThread(lambda: admit(machine(0, secret), WEIGHTS))
    with pytest.raises(ConfigError, match=f"machine 0 refuses this one: {message}") as refused:
        join(dataclasses.replace(machine(1, secret), **given), weights)
    assert "\n" not in str(refused.value)
    close(join(machine(1, secret), WEIGHTS), *master.result()[0])


def test_another_version_and_a_machine_that_joins_twice_are_refused(
    secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    master = InThread(lambda: admit(machine(0, secret, nnodes=3), WEIGHTS))
    first = join(machine(1, secret, nnodes=3), WEIGHTS)
    with pytest.raises(ConfigError, match="node_rank=1 has joined already; give each machine a number of its own"):
        join(machine(1, secret, nnodes=3), WEIGHTS)
    real = Hello

    def older(version: str, *given: Any) -> Hello:
        return real("0.0.1", *given)

    with monkeypatch.context() as patch:
        patch.setattr(nodes, "Hello", older)
        with pytest.raises(ConfigError, match=r"it runs quire 0\.0\.1, and machine 0 .*; install the same"):
            join(machine(2, secret, nnodes=3), WEIGHTS)
    close(first, join(machine(2, secret, nnodes=3), WEIGHTS), *[sock for (sock,) in master.result()])


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n", (2**40).to_bytes(8, "little"), b"", b"\5" + bytes(7) + b"abcde"]
)
def test_what_is_no_machine_of_this_engine_is_ignored(said: bytes, secret: Path) -> None:
    master = InThread(lambda: admit(machine(0, secret), WEIGHTS))
    while True:
        with suppress(ConnectionRefusedError), socket.create_connection((HOST, PORT)) as stranger:
            stranger.sendall(said)
            break
    close(join(machine(1, secret), WEIGHTS), *master.result()[0])


@pytest.mark.parametrize("said", [b"", b"\5"])
def test_strangers_that_fall_silent_delay_no_machine(
    said: bytes, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nodes, "_HANDSHAKE_S", 600.0)
    master = InThread(lambda: admit(machine(0, secret, nnodes=3), WEIGHTS))
    first = join(machine(1, secret, nnodes=3), WEIGHTS)
    strangers = [socket.create_connection((HOST, PORT)) for _ in range(nodes._MAX_CANDIDATES + 1)]
    for stranger in strangers:
        stranger.sendall(said)
    second = join(machine(2, secret, nnodes=3), WEIGHTS)
    close(first, second, *strangers, *[sock for (sock,) in master.result()])


def test_a_stranger_that_falls_silent_is_sent_away(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    master = InThread(lambda: admit(machine(0, secret, nnodes=3), WEIGHTS))
    first = join(machine(1, secret, nnodes=3), WEIGHTS)
    with monkeypatch.context() as patch, socket.create_connection((HOST, PORT), timeout=30) as stranger:
        patch.setattr(nodes, "_HANDSHAKE_S", 0.1)
        with suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
    close(first, join(machine(2, secret, nnodes=3), WEIGHTS), *[sock for (sock,) in master.result()])


def test_a_machine_that_has_ended_before_the_others_came_joins_again(secret: Path) -> None:
    master = InThread(lambda: admit(machine(0, secret, nnodes=3), WEIGHTS))
    for lingers in (0, 1):  # with 1 for no time it ends with a reset
        sock = join(machine(1, secret, nnodes=3), WEIGHTS)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", lingers, 0))
        sock.close()
    again = join(machine(1, secret, nnodes=3), WEIGHTS)
    other = join(machine(2, secret, nnodes=3), WEIGHTS)
    accepted = [sock for (sock,) in master.result()]
    assert [each.getpeername() for each in accepted] == [again.getsockname(), other.getsockname()]
    close(again, other, *accepted)


def test_a_master_that_is_another_program_is_noticed(secret: Path) -> None:
    with socket.create_server((HOST, PORT)) as server:

        def answer() -> None:
            sock, _ = server.accept()
            with sock:
                sock.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        other = InThread(answer)
        with pytest.raises(ConfigError, match="what answers there is no machine 0: "):
            join(machine(1, secret), WEIGHTS)
        other.result()


def test_a_master_without_the_secret_is_noticed(secret: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hello, "proves", lambda *_: True)
    master = InThread(lambda: admit(machine(0, nnodes=3), WEIGHTS))
    with pytest.raises(ConfigError, match="what answers there does not have the secret"):
        join(machine(1, secret, nnodes=3), WEIGHTS)
    socks = [join(machine(rank, nnodes=3), WEIGHTS) for rank in (1, 2)]
    close(*socks, *[sock for (sock,) in master.result()])


def test_machines_that_are_not_there_are_named(
    secret: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "JOIN_S", 0.2)
    monkeypatch.setattr(nodes, "_REMIND_S", 0.0)
    monkeypatch.setattr(nodes, "_RETRY_S", 0.01)
    monkeypatch.setattr(nodes.logger, "propagate", True)
    with pytest.raises(ConfigError, match=rf"nnodes=2: machine\(s\) \[1\] have not joined at {HOST}:29501 for 0.2 s; "):
        admit(machine(0, secret), WEIGHTS)
    with pytest.raises(ConfigError, match=f"master_addr={HOST}:29501: no machine 0 answers there for 0.2 s"):
        join(machine(1, secret), WEIGHTS)
    assert f"for at most 0 s more: machine(s) [1] have not joined at {HOST}:29501" in caplog.text
    assert f"for at most 0 s more: no machine 0 answers at {HOST}:29501" in caplog.text


def test_one_that_waits_says_so_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    times = iter([1000.0, *range(1001, 1302)])
    monkeypatch.setattr(nodes, "time", SimpleNamespace(monotonic=lambda: next(times)))
    monkeypatch.setattr(nodes.logger, "propagate", True)
    patience = nodes._Patience()
    for _ in range(300):
        assert not patience.has_ended("machine(s) [1]")
    assert patience.has_ended("machine(s) [1]")
    told = [record.getMessage() for record in caplog.records]
    assert told[0] == "still waiting, for at most 289 s more: machine(s) [1]"
    assert len(told) == 300 // 11


@pytest.mark.parametrize("call", [admit, join])
def test_addresses_that_others_can_reach_need_a_secret(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_MASTER_SECRET", raising=False)
    monkeypatch.setattr(nodes, "JOIN_S", 0.0)
    with pytest.raises(ConfigError, match=r"master_addr=0\.0\.0\.0:29501: other machines can reach this address, so a"):
        call(machine(1, host="0.0.0.0"), WEIGHTS)
    monkeypatch.setenv("QUIRE_MASTER_SECRET", "swordfish")
    with pytest.raises(ConfigError, match=r"have not joined|no machine 0 answers"):
        call(machine(1, host="0.0.0.0", port=1), WEIGHTS)
    with pytest.raises(ConfigError, match="master_secret_file='/nonexistent' cannot be read"):
        call(machine(1, secret_file="/nonexistent"), WEIGHTS)
    with pytest.raises(ConfigError, match=f"master_secret_file='{os.devnull}' is empty; write a secret to it"):
        call(machine(1, secret_file=os.devnull), WEIGHTS)
    monkeypatch.delenv("QUIRE_MASTER_SECRET")
    with pytest.raises(ConfigError, match="the host is unknown"):
        call(machine(1, host="no.such.host.invalid"), WEIGHTS)


def test_a_secret_that_others_can_read_is_warned_of(
    secret: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "JOIN_S", 0.0)
    monkeypatch.setattr(nodes.logger, "propagate", True)
    for mode, num_warnings in ((0o600, 0), (0o640, 1)):
        secret.chmod(mode)
        with pytest.raises(ConfigError, match="no machine 0 answers"):
            join(machine(1, secret), WEIGHTS)
        assert caplog.text.count("can be read by others; run `chmod 600` on it") == num_warnings


def test_a_port_that_is_in_use_is_named(secret: Path) -> None:
    with (
        socket.create_server((HOST, PORT)),
        pytest.raises(ConfigError, match=f"{HOST}:29501: cannot listen there: .* in"),
    ):
        admit(machine(0, secret), WEIGHTS)


def test_an_address_of_another_machine_cannot_be_listened_at(secret: Path) -> None:
    with pytest.raises(ConfigError, match=r"master_addr=192\.0\.2\.1:29501: cannot listen there: "):
        admit(machine(0, secret, host="192.0.2.1"), WEIGHTS)


def test_fingerprints_tell_weights_and_configs_apart(llama: Path) -> None:
    config = ModelConfig.resolve(llama)
    known = {fingerprint(config)}
    assert fingerprint(ModelConfig.resolve(llama)) in known
    for changed in (
        ModelConfig.resolve(llama, quantization="int8"),
        ModelConfig.resolve(llama, dtype="bfloat16" if config.dtype == "float32" else "float32"),
        ModelConfig.resolve(llama, hf_overrides={"rms_norm_eps": 0.1}),
    ):
        assert fingerprint(changed) not in known
        known.add(fingerprint(changed))
    (file,) = llama.glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(ModelConfig.resolve(llama)) not in known


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"node_rank": 1}, "nnodes=1, node_rank=1: must be 1 or more, and 0 to nnodes - 1"),
        ({"nnodes": 0}, "nnodes=0, node_rank=0: must be 1 or more"),
        (
            {"nnodes": 2},
            "nnodes=2 needs pipeline_parallel_size=2, or 1 and a tensor_parallel_size that is a multiple of 2; given",
        ),
        (
            {"nnodes": 2, "tensor_parallel_size": 3},
            "a multiple of 2; given: pipeline_parallel_size=1 and tensor_parallel_size=3",
        ),
        (
            {"nnodes": 2, "pipeline_parallel_size": 4, "tensor_parallel_size": 2},
            "given: pipeline_parallel_size=4 and",
        ),
        ({"nnodes": 2, "node_rank": 2}, "nnodes=2, node_rank=2: must be 1 or more, and 0 to nnodes - 1"),
        ({"nnodes": 2, "node_rank": -1}, "nnodes=2, node_rank=-1: must be 1 or more, and 0 to nnodes - 1"),
        ({"nnodes": 2, "pipeline_parallel_size": 2}, "master_addr=None must be HOST:PORT of machine 0"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "a:b"}, "master_addr='a:b' must be HOST:PORT"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "a:70000"}, "must be HOST:PORT of machine 0"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": ":7"}, "master_addr=':7' must be HOST:PORT of"),
        ({"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "a" * 64}, "a' must be HOST:PORT of machine 0"),
        (
            {"nnodes": 2, "pipeline_parallel_size": 2, "master_addr": "a", "data_parallel_size": 2},
            "data_parallel_size=2: only one engine can have nnodes=2",
        ),
    ],
)
def test_arguments_that_do_not_fit_together_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineArgs(**given).resolve()


@pytest.mark.parametrize(
    ("given", "found"),
    [("a:7", "a:7"), ("a", "a:29501"), ("[::1]:7", "[::1]:7"), ("[::1]", "[::1]:29501")],
)
def test_addresses_have_a_port(given: str, found: str) -> None:
    config = EngineArgs(nnodes=2, node_rank=1, pipeline_parallel_size=2, master_addr=given).resolve().parallel
    assert config.nodes is not None
    assert config.nodes.master_addr == found


@pytest.mark.parametrize("divided", ["pipeline_parallel_size", "tensor_parallel_size"])
def test_only_machine_0_serves(divided: str) -> None:
    given: dict[str, Any] = {"nnodes": 2, divided: 2, "master_addr": HOST}
    for make in (LLM, Door):
        with pytest.raises(ConfigError, match="node_rank=1: this machine computes for machine 0; start it with"):
            make(**given, node_rank=1)
    with pytest.raises(ConfigError, match="node_rank=0 serves requests; a machine that only computes"):
        run_node(EngineArgs(**given))


def test_several_models_cannot_run_on_several_machines(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--nnodes", "2", "--pipeline-parallel-size", "2", "--master-addr", HOST]
    assert main(["serve", "quire-tiny", "quire-draft", *given]) == 2
    assert "nnodes=2: one model can run on several machines, and 2 are given" in capsys.readouterr().err

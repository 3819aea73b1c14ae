"""Messages between server and engine that are none: either side ends them, and leaves nothing behind."""

import asyncio
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop

from quire.engine.process.messages import Abort, Heartbeat, Ready, Start, ToClient, to_frame
from quire.interfaces.async_llm.engine_client import EngineClient
from quire.interfaces.launch.link import ProcessLink
from tests.clients.served import WAIT_S
from tests.hostile.target import Target


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


NONSENSE = {
    "random bytes": bytes(range(256)) * 8,
    "HTTP": b"GET / HTTP/1.1\r\nhost: a\r\n\r\n",
    "a frame of 4 GB": b"\xff\xff\xff\xff" + bytes(100),
    "half a frame": framed(b"x" * 100)[:50],
    "JSON": framed(b'{"type": "Start", "args": {}}'),
    "a pickle": framed(b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94\x93\x94\x8c\x04true\x94\x85\x94R\x94."),
    "no UTF-8": framed(b"\x82\xa4type\xa5Abort\xaarequest_id\xa2\xff\xff"),
    "nested too deeply": framed(b"\x82\xa4type\xa5Start\xa4args\x81\xa1a" + b"\x91" * 20_000 + b"\x01"),
    "a map of 4 billion": framed(b"\x82\xa4type\xa5Start\xa4args\xdf\xff\xff\xff\xff"),
    "an unknown kind": framed(b"\x81\xa4type\xa4Exec"),
    "an extension": framed(b"\xc7\x05\x01hello"),
}


def engine_process() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, its = socket.socketpair()
    with its:
        command = [sys.executable, "-P", "-m", "quire.engine.process.engine_process", str(its.fileno())]
        process = subprocess.Popen(command, pass_fds=[its.fileno()], stderr=subprocess.PIPE)
    ours.settimeout(WAIT_S)
    return process, ours


def end(process: subprocess.Popen[bytes]) -> str:
    """What it has said, once it has ended by itself."""
    try:
        return process.communicate(timeout=WAIT_S)[1].decode()
    finally:
        process.kill()
        process.communicate()


def messages(ours: socket.socket) -> Iterator[ToClient]:
    """What the engine sends, to its end."""
    while head := ours.recv(4, socket.MSG_WAITALL):
        yield msgspec.msgpack.decode(ours.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL), type=ToClient)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NONSENSE)
def test_an_engine_that_receives_nonsense_ends(name: str):
    """Instead of what engine to make, and later, instead of a request. It is nobody's any more."""
    process, ours = engine_process()
    with ours:
        ours.sendall(NONSENSE[name])
        ours.shutdown(socket.SHUT_WR)
        assert {type(message) for message in messages(ours)} <= {Heartbeat}
    assert "Exception in thread" not in end(process)
    process, ours = engine_process()
    with ours:
        ours.sendall(to_frame(Start({"num_gpu_blocks_override": 8, "max_model_len": 64})))
        assert isinstance(next(each for each in messages(ours) if not isinstance(each, Heartbeat)), Ready)
        ours.sendall(to_frame(Abort(["nobody's"])) + NONSENSE[name])
        if name in ("random bytes", "half a frame"):  # it waits for the rest
            ours.shutdown(socket.SHUT_WR)
        while ours.recv(65536):
            pass
    assert "Exception in thread" not in end(process)


@pytest.mark.parametrize("name", NONSENSE)
def test_a_server_that_receives_nonsense_abandons_its_engine(name: str):
    """It reads no more, and ends the process; then all that waits is told, or another engine has it."""

    async def main() -> None:
        ours, its = socket.socketpair()
        process = subprocess.Popen(["sleep", "600"])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client, taken = EngineClient(ProcessLink(process, reader, writer), None), list[Any]()
        with its:
            its.sendall(NONSENSE[name])
            its.shutdown(socket.SHUT_WR)
            await asyncio.wait_for(client.read(taken.append), WAIT_S)
        process.terminate()  # as an engine does when its socket has gone
        assert "ended by signal" in await client.end()
        assert taken == []

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_what_is_sent_to_an_engine_that_has_ended_is_dropped(run, caplog: pytest.LogCaptureFixture):
    """Before its end is noticed, requests and aborts may still be sent."""

    async def main() -> None:
        ours, its = socket.socketpair()
        process = subprocess.Popen(["true"])
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        client = EngineClient(ProcessLink(process, reader, writer), None)
        its.close()
        for _ in range(3):
            client.send(Abort(["a"]))
            await client.drain()
            await asyncio.sleep(0)
        assert await client.end() == "its process ended with status 0"

    run(main())
    assert not caplog.records


def test_no_other_process_can_talk_to_the_engine(guarded: Target):
    """The server listens for HTTP, and the engine for nobody: their socket has no name."""
    server, engine = (set(sockets_of(pid)) for pid in guarded.served.pids)
    listening = {line.split()[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line}
    named = {line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7}
    assert len(server & listening) == 1
    assert not engine & listening
    assert not (server | engine) & named


def sockets_of(pid: int) -> list[str]:
    found = []
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        try:
            link = os.readlink(f"/proc/{pid}/fd/{descriptor}")
        except FileNotFoundError:
            continue
        found += re.findall(r"socket:\[(\d+)\]", link)
    return found

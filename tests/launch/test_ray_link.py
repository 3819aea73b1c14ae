"""RayLink and EngineActor without Ray: an actor that is called as Ray would, with nothing but bytes."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine
from types import ModuleType
from typing import Any, ClassVar

import msgspec
import pytest

from quire import AsyncLLM, ConfigError, EngineArgs, SamplingParams
from quire.common.version import __version__
from quire.interfaces.async_llm import starting
from quire.interfaces.launch import link, ray_actor
from quire.interfaces.launch.placing import Placed
from quire.interfaces.launch.ray_actor import EngineActor, Hello, RayLink

ECHO = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\nwhile data := s.recv(65536): s.sendall(data)\n"
SILENT = "import socket, sys\ns = socket.socket(fileno=int(sys.argv[1]))\ns.recv(1)\nsys.exit(7)\n"


class RayError(Exception):
    """As ray.exceptions.RayError."""


class FakeActor:
    """Calls an EngineActor as Ray does: in its own order of time, with copies of bytes, until it is killed."""

    made: ClassVar[list["FakeActor"]] = []

    def __init__(self, hello: Callable[[Hello], Hello] = lambda hello: hello) -> None:
        self.actor = EngineActor()
        self.num_bytes: list[int] = []
        self.is_killed = asyncio.Event()
        self._hello = hello
        self.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return type("Method", (), {"remote": lambda _, *given: asyncio.ensure_future(self._call(name, *given))})()

    async def _call(self, name: str, *given: bytes) -> bytes:
        assert all(type(each) is bytes for each in given), "Ray would pickle it"
        self.num_bytes += map(len, given)
        call = asyncio.ensure_future(getattr(self.actor, name)(*given))
        dying = asyncio.ensure_future(self.is_killed.wait())
        await asyncio.wait({call, dying}, return_when=asyncio.FIRST_COMPLETED)
        dying.cancel()
        if not call.done() or self.is_killed.is_set():
            call.cancel()
            raise RayError("The actor died unexpectedly.\nMore lines follow.")
        result: bytes = call.result()
        assert type(result) is bytes, "Ray would pickle it"
        if name == "start":
            result = msgspec.msgpack.encode(self._hello(msgspec.msgpack.decode(result, type=Hello)))
        self.num_bytes.append(len(result))
        return result

    def kill(self) -> None:
        self.is_killed.set()
        self.actor._port.close()
        self.actor._link.kill()  # as the process ends with the actor that has started it


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    module, exceptions = ModuleType("ray"), ModuleType("ray.exceptions")
    module.kill = lambda actor: actor.kill()  # type: ignore[attr-defined]
    exceptions.RayError = RayError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ray", module)
    monkeypatch.setitem(sys.modules, "ray.exceptions", exceptions)


def run(monkeypatch: pytest.MonkeyPatch, program: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run this with engine processes that are this program."""

    def start(its: Any, variables: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", program, str(its.fileno())], pass_fds=[its.fileno()])

    async def main_and_end() -> None:
        FakeActor.made.clear()
        await main()
        for actor in FakeActor.made:
            await actor.actor._link.end()

    monkeypatch.setattr(link, "start_process", start)
    asyncio.run(asyncio.wait_for(main_and_end(), 60))


def test_bytes_cross_in_order_in_pieces_and_the_process_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(5 * 2**20 + 3)

    async def main() -> None:
        actor = FakeActor()
        one = await RayLink.start(actor)
        assert (one.pid, one.clock_s) == (actor.actor._link.pid, 0.0), "on this machine"
        for start in range(0, len(data), 700_000):
            one.write(data[start : start + 700_000])
            await one.drain()
        assert await one.reader.readexactly(len(data)) == data
        assert max(actor.num_bytes) <= link.READ_AHEAD_BYTES
        assert await one.end() == await one.end() == "its process ended with status 0"
        one.write(b"after the end")
        await one.drain()

    run(monkeypatch, ECHO, main)


def test_what_is_not_read_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        actor = FakeActor()
        one = await RayLink.start(actor)
        for _ in range(8):
            one.write(bytes(2**20))
        await asyncio.sleep(0.3)
        assert len(one.reader._buffer) <= 4 * link.READ_AHEAD_BYTES  # type: ignore[attr-defined]
        assert await one.reader.readexactly(8 * 2**20) == bytes(8 * 2**20)
        await one.end()

    run(monkeypatch, ECHO, main)


def test_an_actor_that_dies_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        actor = FakeActor()
        one = await RayLink.start(actor)
        reading = asyncio.create_task(one.reader.read())
        actor.kill()
        assert await reading == b""
        one.write(b"x")
        await one.drain()
        assert await one.end() == "its actor ended: The actor died unexpectedly."

    run(monkeypatch, ECHO, main)


def test_a_process_that_ends_is_reported_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        one = await RayLink.start(FakeActor())
        one.write(b"x")
        assert await one.reader.read() == b""
        assert await one.end() == "its process ended with status 7"

    run(monkeypatch, SILENT, main)


def test_an_engine_is_killed_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        actor = FakeActor()
        one = await RayLink.start(actor)
        one.kill()
        assert actor.is_killed.is_set()
        assert await one.reader.read() == b""
        assert "its actor ended" in await one.end()

    run(monkeypatch, ECHO, main)


def test_an_actor_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_actor, "_END_LIMIT_S", 0.05)

    async def main() -> None:
        actor = FakeActor()
        one = await RayLink.start(actor)

        async def never() -> bytes:
            await asyncio.Event().wait()
            return b""

        monkeypatch.setattr(actor.actor, "end", never)
        assert await one.end() == "its actor did not answer for 0.05 s"
        assert actor.is_killed.is_set()

    run(monkeypatch, ECHO, main)


def test_an_engine_of_another_machine_has_another_clock_and_no_process_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, machine="another", monotonic_s=hello.monotonic_s + 1000)

    async def main() -> None:
        one = await RayLink.start(FakeActor(elsewhere))
        assert one.pid is None
        assert one.clock_s == pytest.approx(1000, abs=5)
        await one.end()

    run(monkeypatch, ECHO, main)


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, version="0.0.1", node="n7")

    async def main() -> None:
        actor = FakeActor(older)
        message = f"the node n7 of the Ray cluster has quire 0.0.1, and this process {__version__}: install the same"
        with pytest.raises(ConfigError, match=message):
            await RayLink.start(actor)

    run(monkeypatch, ECHO, main)


@pytest.mark.slow
def test_an_engine_behind_actors_gives_the_tokens_of_a_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is of another machine, whose clock differs."""
    args = EngineArgs(num_gpu_blocks_override=64, num_threads=1)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
    given_back: list[bool] = []

    def elsewhere(hello: Hello) -> Hello:
        return msgspec.structs.replace(hello, machine="another", monotonic_s=hello.monotonic_s - 5000)

    def place(args: EngineArgs) -> Placed:
        return Placed([(args, lambda: RayLink.start(FakeActor(elsewhere)))], lambda: given_back.append(True))

    async def answer() -> tuple[Any, float]:
        llm = await AsyncLLM.from_args(args)
        try:
            outputs = [output async for output in llm.generate("def f(", params, "1")]
        finally:
            await llm.shutdown()
        metrics = outputs[-1].metrics
        return outputs[-1].outputs, metrics.finished_time - metrics.first_token_time

    local, _ = asyncio.run(answer())
    monkeypatch.setattr(starting, "place", place)
    remote, seconds = asyncio.run(answer())
    assert remote == local
    assert 0 <= seconds < 60
    assert given_back == [True]

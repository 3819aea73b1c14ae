"""Servers for real clients: a `quire serve` process, and one in a thread whose model says what it is told to."""

import asyncio
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

import quire
from quire.common import faults
from quire.common.faults import Fault
from quire.server.api.tools.formats import TOOL_FORMATS
from tests.forks import Forked, children_of, run_quire
from tests.server.in_process import saying

MODEL = "quire-tiny"
CHECKPOINT = Path(quire.__file__).parent / "models" / "embedded" / MODEL
KEY = "a-key-for-tests"
MAX_NUM_SEQS = 32
MAX_WAITING = 96
WAIT_S = 90
_ARGS = ["--port", "0", "--kv-cache-memory", "32MiB", "--max-num-seqs", str(MAX_NUM_SEQS),
         "--max-waiting", str(MAX_WAITING), "--tool-parser", "hermes", "--log-format", "json"]  # fmt: skip


@dataclass(frozen=True)
class Served:
    """Where clients find a server."""

    url: str
    """without a slash at its end"""
    pids: tuple[int, ...] = ()
    """of the server's process and its engine's"""

    @property
    def openai(self) -> dict[str, str]:
        """What OpenAI's client is made with."""
        return {"base_url": f"{self.url}/v1", "api_key": KEY}

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {KEY}"}

    def metric(self, name: str) -> float:
        """A metric's value, summed over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics") as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert found, f"there is no metric {name}"
        return sum(map(float, found))

    def wait_until_idle(self) -> None:
        """Until the engine has no request any more; fails if that does not happen."""
        deadline = time.monotonic() + WAIT_S
        while any(self.metric(f"vllm:num_requests_{state}") for state in ("running", "waiting")):
            assert time.monotonic() < deadline, "requests are left in the engine"
            time.sleep(0.02)


@contextmanager
def quire_serve(folder: Path, *args: str, keys: str = KEY, pause_s: float = 0.0) -> Iterator[Served]:
    """The process, from when it can be used until the block ends; what it says is in `serve.log`. Before each step it
    pauses for `pause_s`, as a larger model would compute, but without using a core."""
    log = folder / "serve.log"
    environment = os.environ | {"QUIRE_API_KEY": keys}
    if pause_s:
        environment |= faults.environment(Fault("step.start", action="delay", seconds=pause_s, times=None))
    with log.open("wb") as file, run_quire(["serve", *_ARGS, *args], file.fileno(), environment) as process:
        try:
            url = _wait_for_url(process, log)
            yield Served(url, (process.pid, *children_of(process.pid)))
        finally:
            process.terminate()
            try:
                process.wait(WAIT_S)
            finally:
                process.kill()
    assert process.returncode == 0, log.read_text()


def _wait_for_url(process: Forked | subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + WAIT_S
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"serves \S+ at (http://[\w.:]+) ", log.read_text()):
            return found[1]
        time.sleep(0.05)
    raise AssertionError(log.read_text())


@contextmanager
def saying_server(reply: str, **kwargs: Any) -> Iterator[Served]:
    """The server's application over a model that says `reply` to everything, behind a real socket. For `kwargs` see
    `saying`."""
    with in_thread(saying(reply, tool_format=TOOL_FORMATS["hermes"], **kwargs).app) as url:
        yield Served(url)


@contextmanager
def in_thread(app: Any) -> Iterator[str]:
    """The URL at which an ASGI application answers, in a thread, until the block ends."""
    http = uvicorn.Server(uvicorn.Config(app, port=0, lifespan="off", log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(http.serve()))
    thread.start()
    try:
        deadline = time.monotonic() + WAIT_S
        while not http.started:
            assert thread.is_alive()
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = True
        thread.join(WAIT_S)

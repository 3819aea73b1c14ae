"""A `quire serve` process for test programs, its use of resources, and a cheap HTTP client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_S = 120.0


@dataclass(frozen=True)
class Resources:
    """The resources that a process uses."""

    memory_bytes: int
    num_threads: int
    num_files: int

    @classmethod
    def of(cls, pid: int) -> Resources:
        """Return what a process uses now. Raises OSError if the process has ended."""
        status = Path(f"/proc/{pid}/status").read_text()
        sizes = dict(re.findall(r"^(\w+):\s+(\d+)", status, re.MULTILINE))
        memory_bytes = 1024 * (int(sizes["RssAnon"]) + int(sizes["RssShmem"]))
        return cls(memory_bytes, int(sizes["Threads"]), len(os.listdir(f"/proc/{pid}/fd")))


def busy_s(pid: int | None = None) -> float:
    """Return the processor seconds that a process, or by default the whole machine, has used since its start."""
    if pid is None:
        user, nice, system, _idle, _waiting, *more = Path("/proc/stat").read_text().partition("\n")[0].split()[1:8]
        ticks = [user, nice, system, *more]
    else:
        ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


class Served:
    """A running server. The constructor waits until it is ready, and raises RuntimeError with its log if it fails."""

    def __init__(self, flags: list[str], log: Path, environment: Mapping[str, str] | None = None) -> None:
        command = [sys.executable, "-m", "quire", "serve", "--port=0", *flags]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=os.environ | dict(environment or {}))
        deadline = time.monotonic() + READY_S
        while not (found := re.search(r"serves .* at http://[\d.]+:(\d+)", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        self.port = int(found[1])

    @property
    def pid(self) -> int:
        """Process id of the API process."""
        return self.process.pid

    @property
    def engine_pid(self) -> int | None:
        """Process id of the engine process; None if none runs."""
        for child in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
            if b"engine_process" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
        return None

    def get(self, path: str) -> tuple[int, bytes]:
        """GET a path; return the status and the body."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def metric(self, name: str) -> float:
        """Return a metric, summed over its labels; 0 if it does not exist yet."""
        text = self.get("/metrics")[1].decode()
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def wait_until_idle(self, limit_s: float) -> bool:
        """Wait until no request runs or waits and no block is in use; return False if that takes too long."""
        deadline = time.monotonic() + limit_s
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any(self.metric(name) for name in names):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def close(self) -> int:
        """End the server and return its exit status, or -9 if it had to be killed."""
        self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


@dataclass
class Exchange:
    """A request and its response."""

    began_s: float
    status: int = 0
    """HTTP status; 0 if there was no response."""
    answered_s: float | None = None
    """Seconds from the request to the first bytes of the response."""
    event_times: list[float] = field(default_factory=list)
    """Times of a stream's events, in seconds of time.perf_counter()."""
    body: bytearray = field(default_factory=bytearray)
    """Body of the response, in chunked encoding if the server used it."""
    ended: bool = False
    """Whether the response is complete."""

    @property
    def events(self) -> list[dict[str, Any]]:
        """The decoded events of a stream, without `[DONE]`."""
        found = re.findall(rb"^data: ({.*)$", bytes(self.body), re.MULTILINE)
        return [json.loads(line) for line in found]


class _Connection(asyncio.Protocol):
    def __init__(self, request: bytes, leave_after: int | None) -> None:
        self.exchange = Exchange(time.perf_counter())
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._leave_after = leave_after
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        exchange, now = self.exchange, time.perf_counter()
        if exchange.answered_s is None:
            exchange.answered_s = now - exchange.began_s
            exchange.status = int(data[9:12])
        exchange.body += data
        exchange.event_times += [now] * data.count(b"data: {")
        if self._leave_after is not None and len(exchange.event_times) >= self._leave_after:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        head, _, body = bytes(self.exchange.body).partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        self.exchange.ended = len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")
        self.exchange.body = bytearray(body)
        if not self.closed.done():
            self.closed.set_result(None)


async def post(port: int, path: str, body: bytes, *, leave_after: int | None = None, **headers: str) -> Exchange:
    """Send a POST over a connection of its own; the client disconnects after `leave_after` events.

    A refused connection gives an Exchange without a status. Cancelling the call disconnects too.
    """
    given = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n{given}\r\n"
    connection = _Connection(head.encode() + body, leave_after)
    loop = asyncio.get_running_loop()
    try:
        transport, _ = await loop.create_connection(lambda: connection, "127.0.0.1", port)
    except OSError:
        return connection.exchange
    try:
        await connection.closed
    finally:
        transport.abort()
    return connection.exchange

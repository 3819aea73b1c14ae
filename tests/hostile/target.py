"""A server under attack, and what must be as before afterwards: a canary's tokens, memory, files, and its health."""

import contextlib
import http.client
import json
import os
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.common.memory import IDLE_S
from tests.clients.served import KEY, WAIT_S, Served
from tests.forks import children_of

PATIENCE = float(os.environ.get("QUIRE_HOSTILE_PATIENCE", "6"))
"""times as slow as a machine of its own may be where all tests run at once; `make hostile` allows 1"""
LIMIT_S = 2.0 * PATIENCE
"""for every answer"""
GROWTH_MB, PEAK_MB = 128, 400
"""that all the server's processes may hold more after a case, or meanwhile; allocators keep what was once needed"""
JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
CANARY = {"prompt": "Once upon a time", "max_tokens": 48, "temperature": 0, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Reply:
    """An answer; status 0: the connection was closed without one."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    seconds: float = 0.0

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """What an error says."""
        body = self.json
        error = body if body.keys() == {"id", "message"} else body["error"]  # the former is Cohere's form
        return str(error if isinstance(error, str) else error["message"])

    @property
    def cached_tokens(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@dataclass
class Results:
    """Of all cases in this process; told at the end of the run."""

    counts: Counter[str] = field(default_factory=Counter)
    """cases, requests, streams, and each status"""
    worst: dict[str, tuple[float, str]] = field(default_factory=dict)
    """seconds of an answer, seconds between a canary's tokens, MB grown and MB at the most: the largest, and whose"""

    def note(self, what: str, value: float, name: str) -> None:
        self.worst[what] = max(self.worst.get(what, (0.0, "")), (round(value, 3), name))


RESULTS = Results()


class Canary(threading.Thread):
    """Asks for the same stream over and over; its tokens must be the same."""

    def __init__(self, target: "Target") -> None:
        super().__init__(daemon=True)
        self._target = target
        self._sings, self._ends = threading.Event(), threading.Event()
        self.wrong: list[Any] = []
        self.num_streams = 0
        self.longest_gap_s = 0.0

    def __enter__(self) -> "Canary":
        self.start()
        assert self._sings.wait(WAIT_S), "the canary got no token"
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self.join(WAIT_S)
        assert not self.is_alive(), "the canary's stream does not end"

    def run(self) -> None:
        while not self._ends.is_set():
            try:
                found = self._target.stream(self._note_token)
            except Exception as error:
                self.wrong.append(error)
                break
            self.num_streams += 1
            if found != self._target.song:
                self.wrong.append(found)
        self._sings.set()

    def _note_token(self, gap_s: float) -> None:
        self.longest_gap_s = max(self.longest_gap_s, gap_s)
        self._sings.set()


class Target:
    """What is attacked. One thread at a time calls it, beside the canary."""

    def __init__(self, served: Served, log: Path, key: str | None = KEY) -> None:
        self.served = served
        self.log = log
        self.key = {} if key is None else {"authorization": f"Bearer {key}"}
        self.address = served.url.removeprefix("http://")
        self.is_json_logged = log.read_text().startswith("{")
        self._log_end = 0
        self._connection: http.client.HTTPConnection | None = None
        for body in WARM_UP:
            assert self.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 4} | body).status == 200
        self.song = self.stream()
        assert len(self.song) == CANARY["max_tokens"]
        self.settle()
        self.memory_mb, self.num_files = self._held("VmRSS"), self._num_files()

    # Asking

    def ask(self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None) -> Reply:
        """One request over a connection that is kept; a server that closes it instead of answering: status 0."""
        start_s = time.monotonic()
        for _ in range(2):  # a kept connection may have been closed meanwhile
            is_new = self._connection is None
            connection = self._connection or http.client.HTTPConnection(self.address, timeout=WAIT_S)
            self._connection = connection
            try:
                connection.request(method, path, body, self.key | JSON | (headers or {}))
                answer = connection.getresponse()
                content = answer.read()
            except (http.client.HTTPException, ConnectionError):
                self.close()
                if is_new:
                    break
                continue
            if answer.will_close:
                self.close()
            named = {name.lower(): value for name, value in answer.getheaders()}
            return self._noted(Reply(answer.status, named, content, time.monotonic() - start_s))
        return self._noted(Reply(seconds=time.monotonic() - start_s))

    def post(self, path: str, body: Any, headers: dict[str, str] | None = None) -> Reply:
        return self.ask("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

    def get(self, path: str, headers: dict[str, str] | None = None) -> Reply:
        return self.ask("GET", path, headers=headers)

    def say(self, *pieces: bytes, pause_s: float = 0.0, limit_s: float = LIMIT_S) -> Reply:
        """Bytes over a connection of their own; the first answer, or what it was until the server closed."""
        start_s, got = time.monotonic(), b""
        host, port = self.address.rsplit(":", 1)
        with contextlib.suppress(ConnectionError), socket.create_connection((host, int(port)), limit_s) as connection:
            for piece in pieces:
                connection.sendall(piece)
                if pause_s:
                    time.sleep(pause_s)
            while chunk := connection.recv(65536):
                got += chunk
                if got.count(b"\r\n\r\n") and _is_whole(got):
                    break
        status = re.match(rb"HTTP/1\.1 (\d{3})", got)
        body = got.partition(b"\r\n\r\n")[2]
        return self._noted(Reply(int(status[1]) if status else 0, {}, body, time.monotonic() - start_s))

    def stream(self, on_token: Any = lambda gap_s: None) -> list[int]:
        """The canary's tokens. Requests beside it have the same key and may fill the queue: then it waits."""
        deadline_s = time.monotonic() + WAIT_S
        while (token_ids := self._stream(on_token)) is None:
            assert time.monotonic() < deadline_s, "the queue stays full"
            time.sleep(0.01)
        return token_ids

    def _stream(self, on_token: Any) -> list[int] | None:
        """As `stream`; None if the queue is full."""
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=WAIT_S)) as connection:
            connection.request("POST", COMPLETIONS, json.dumps(CANARY | {"return_token_ids": True}), self.key | JSON)
            answer, last_s = connection.getresponse(), None
            if answer.status == 429:
                assert json.loads(answer.read())["error"]["code"] == "queue_full"
                return None
            assert answer.status == 200, answer.read()
            token_ids: list[int] = []
            while (line := answer.readline()) != b"data: [DONE]\n":
                assert line, "the stream was cut off"
                if line.startswith(b"data: ") and (choices := json.loads(line[6:])["choices"]):
                    now_s = time.monotonic()
                    on_token(0.0 if last_s is None else now_s - last_s)
                    last_s = now_s
                    token_ids += choices[0]["token_ids"]
        return token_ids

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _noted(self, reply: Reply) -> Reply:
        RESULTS.counts["requests"] += 1
        RESULTS.counts[f"status {reply.status}" if reply.status else "closed without an answer"] += 1
        return reply

    # Being unharmed

    @contextlib.contextmanager
    def unharmed(self, name: str, *, is_heard: bool = True, growth_mb: float = GROWTH_MB) -> Iterator[None]:
        """What is done within does no harm: to a canary beside it, if that is to be heard, and afterwards."""
        before_mb = self._held("VmRSS")
        for pid in self.pids():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        if is_heard:
            with Canary(self) as canary:
                yield
            assert not canary.wrong, f"the canary's stream changed: {canary.wrong[:3]}"
            RESULTS.counts["canary streams"] += canary.num_streams
            RESULTS.note("seconds between tokens of a canary", canary.longest_gap_s, name)
        else:
            yield
        RESULTS.counts["cases beside a canary" if is_heard else "cases alone"] += 1
        self.settle()
        self.check_health()
        peak_mb, grown_mb = self._held("VmHWM") - before_mb, self._held("VmRSS") - before_mb
        if grown_mb > growth_mb:  # it may be given back in a moment
            time.sleep(2 * IDLE_S)
            grown_mb = self._held("VmRSS") - before_mb
        RESULTS.note("MB grown", grown_mb, name)
        RESULTS.note("MB at the most", peak_mb, name)
        assert grown_mb <= growth_mb, f"memory has grown by {grown_mb:.0f} MB"
        assert peak_mb <= PEAK_MB, f"memory grew by {peak_mb:.0f} MB meanwhile"
        self.check_log()

    def check_health(self) -> None:
        """It generates a token. Requests that were left a moment ago may still be on their way through the queue."""
        deadline_s = time.monotonic() + WAIT_S
        while (answer := self.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1})).status == 429:
            assert time.monotonic() < deadline_s, "the queue stays full"
            time.sleep(0.01)
        assert answer.status == 200, f"the server is not well: {answer}"
        assert answer.json["usage"]["completion_tokens"] == 1

    def check_log(self) -> None:
        """Every line since the last time is one that the server wrote, and tells of no failure of its own."""
        with self.log.open() as file:
            file.seek(self._log_end)
            text, _, rest = file.read().rpartition("\n")
            self._log_end = file.tell() - len(rest.encode())
        for line in text.splitlines():
            assert "Traceback" not in line, text
            if self.is_json_logged:
                assert json.loads(line)["level"] != "error", line
            else:
                assert re.match(r"    |\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING) ", line), line

    def settle(self, *, of_files: bool = True) -> None:
        """Until no request, block or connection but ours is left; fails if that does not come."""
        deadline_s, left = time.monotonic() + WAIT_S, "not asked"
        self.close()
        while left:
            assert time.monotonic() < deadline_s, f"left behind: {left}"
            text = self.get("/metrics").body.decode()
            names = ("vllm:num_requests_running", "vllm:num_requests_waiting", 'quire:kv_cache_blocks.*"owned"')
            left = [
                line for line in text.splitlines() for name in names if re.match(name, line) and line[-4:] != " 0.0"
            ]
            if of_files and hasattr(self, "num_files") and self._num_files() > self.num_files + 8:
                left.append(f"{self._num_files()} files, {self.num_files} at first")

    def check_whole_run(self) -> None:
        """At the end of all cases, and after a moment in which memory is given back."""
        self.settle()
        time.sleep(2 * IDLE_S)
        grown_mb = self._held("VmRSS") - self.memory_mb
        RESULTS.note("MB grown by all cases", grown_mb, "all")
        assert grown_mb <= 1.5 * GROWTH_MB, f"memory has grown by {grown_mb:.0f} MB in all"

    def pids(self) -> list[int]:
        """The server, its engine, and their children."""
        found = [self.served.pids[0]]
        for pid in found:
            found += children_of(pid)
        return found

    def _held(self, name: str) -> float:
        """MB of all processes."""
        num_kb = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                found = re.search(rf"{name}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                num_kb += int(found[1]) if found else 0
        return num_kb / 1024

    def _num_files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in self.served.pids)


def _is_whole(answer: bytes) -> bool:
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])


WARM_UP: list[dict[str, Any]] = [
    {},
    {"n": 8, "best_of": 16, "logprobs": 20, "prompt_logprobs": 20},
    {"prompt": ["a"] * 64},
    {"prompt": [5] * 1900},
    {"n": 4, "use_beam_search": True},
    *[{"guided_regex": f"[a-z]{{{i}}}"} for i in range(1, 9)],
    {"prompt": ["a", "b", "c"], "guided_json": {"type": "object"}},
]
"""what takes memory that is kept for good: threads, buffers, the grammar library"""

"""`quire top`: a server's cache and queues as text."""

import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from types import SimpleNamespace

import msgspec
import pytest

from quire.cli import main
from quire.cli.terminal.top import Picture
from quire.engine.view.cache_frame import (
    CACHED,
    OWNED,
    BlockColumns,
    CacheEvent,
    CacheMirror,
    CacheSetup,
    CacheUpdate,
    RequestRow,
)

COUNTERS = {
    "running": 1, "waiting": 1, "swapped": 0, "used_blocks": 2, "cached_blocks": 1, "generated_tokens": 30,
    "preemptions": 3, "preemptions_by_swap": 1, "prefix_hit": 30, "prefix_queried": 40, "prefix_evicted": 16,
}  # fmt: skip
BLOCKS = BlockColumns(
    ids=[0, 1, 5],
    states=[OWNED, OWNED, CACHED],
    refs=[2, 1, 0],
    filled=[16, 3, 16],
    depths=[0, 1, 0],
    hits=[4, 0, 0],
    hashes=[11, 0, 12],
    parents=[1, 11, 1],
    owners=[[0, 1], [0], []],
)
REQUESTS = [
    RequestRow(0, "cmpl-first", "running", "decode", "", 0, 1, 18, 16, 18, 30, 60, 2, 1),
    RequestRow(1, "cmpl-second", "waiting", "prefill", "", 0, 1, 20, 0, 0, 0, 0, 0, 0, "sql"),
]
SNAPSHOT = CacheUpdate(0, 10.0, CacheSetup(16, 8, 0, 1, 4), BLOCKS, None, REQUESTS, [], COUNTERS)
LATER = CacheUpdate(1, 12.0, counters={"generated_tokens": 50}, events=[CacheEvent("evicted", 2, block_ids=[5, 6])])


class Handler(BaseHTTPRequestHandler):
    """Tells two frames, or refuses."""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        assert path == "/debug/cache/events"
        if query not in ("", "model=org%2FB%26c"):
            self.refuse(404, b'{"error": {"message": "the model is not served here; available: A, org/B&c"}}')
        elif self.headers["authorization"] != "Bearer right":
            self.refuse(401, b'{"error": {"message": "no such key"}}')
        else:
            self.tell()

    def refuse(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def tell(self) -> None:
        self.send_response(200)
        self.end_headers()
        for update in (LATER, SNAPSHOT, LATER):  # the first is meant for somebody who has watched before
            self.wfile.write(b": keep-alive\n\ndata: " + msgspec.json.encode(update) + b"\n\n")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "30")


def test_once_prints_one_picture(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--api-key", "right", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "prefix hits 75%" in lines[0]
    assert "preemptions 3 (1 by swap)" in lines[0]
    assert "25.0% of 8 blocks of 16 in use" in lines[1]
    assert "5 free" in lines[1]
    assert lines[2] == "██···░··"
    assert lines[4] == "running 1"
    assert "cmpl-first" in lines[5]
    assert "prompt ██████████ output █████····· 30/60 tokens, 2 blocks, preempted 1x" in lines[5]
    assert lines[6] == "waiting 1"
    assert lines[7].endswith("0 tokens, 0 blocks, adapter sql")
    assert all(len(line) <= 100 for line in lines)


def test_one_of_several_models_is_named(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--api-key", "right", "--once", "--model", "org/B&c"]) == 0
    assert "25.0% of 8 blocks" in capsys.readouterr().out
    assert main(["top", "--url", url, "--api-key", "right", "--once", "--model", "C"]) == 2
    error = capsys.readouterr().err
    assert error.endswith("answers 404: the model is not served here; available: A, org/B&c\n")
    assert error.count("\n") == 1


def test_without_a_terminal_there_is_one_picture_without_escapes(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", url, "--api-key", "right"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "25.0% of 8 blocks of 16 in use" in out.splitlines()[1]


def test_the_key_may_come_from_the_environment(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["top", "--url", url, "--once"]) == 2
    assert "answers 401: no such key" in capsys.readouterr().err
    monkeypatch.setenv("QUIRE_API_KEY", "right, other")
    assert main(["top", "--url", url, "--once"]) == 0


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "http://127.0.0.1:bad", "ftp://x", "nonsense"])
def test_a_missing_server_is_reported(address: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", address, "--once"]) == 2
    error = capsys.readouterr().err
    assert address in error
    assert error.count("\n") == 1


def test_a_terminal_shows_picture_after_picture_until_the_stream_ends(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["top", "--url", url, "--api-key", "right"]) == 2
    captured = capsys.readouterr()
    assert "closed the connection" in captured.err
    last = captured.out.rpartition("\x1b[H")[2]
    assert "10.0 tokens/s" in last  # 20 more in 2 s
    assert "evicted x2  blocks 5, 6" in last
    assert captured.out.endswith("\x1b[?25h\x1b[?1049l")


@pytest.mark.parametrize(
    "told",
    [
        b"data: " + msgspec.json.encode(CacheUpdate(0, 1.0, CacheSetup(16, 8, 0, 1, 4))),  # no counters
        b"data: " + msgspec.json.encode(CacheUpdate(0, 1.0, CacheSetup(16, 8, 0, 1, 4), counters=COUNTERS, gone=[7])),
        b'data: {"number": ' + b"[" * 100_000,
        b"data: \xff",
        b"data: 1",
    ],
    ids=range(5),
)
def test_nonsense_is_an_error_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], told: bytes
) -> None:
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: BytesIO(told + b"\n\n"))
    assert main(["top", "--url", "http://localhost", "--once"]) == 2
    assert "sent invalid data" in capsys.readouterr().err


def test_the_servers_error_is_passed_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = b'data: {"error": {"message": "the server is shutting down", "type": "service_unavailable"}}\n\n'
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: BytesIO(said))
    assert main(["top", "--url", "http://localhost", "--once"]) == 2
    assert capsys.readouterr().err == "quire: the server at http://localhost: the server is shutting down\n"


def test_a_signal_to_end_leaves_the_terminal_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def frames() -> Iterator[bytes]:
        yield b"data: " + msgspec.json.encode(SNAPSHOT) + b"\n"
        assert signal.getsignal(signal.SIGTERM) is not before  # otherwise the next line would end the tests
        signal.raise_signal(signal.SIGTERM)

    lines = frames()
    response = nullcontext(SimpleNamespace(readline=lambda limit: next(lines, b"")))
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: response)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(SystemExit) as ended:
        main(["top"])
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().out.endswith("\x1b[?25h\x1b[?1049l")
    assert signal.getsignal(signal.SIGTERM) is before


def test_no_name_is_a_command_to_the_terminal() -> None:
    mirror = CacheMirror()
    picture = Picture(mirror, is_coloured=False)
    name = "a\x1b[2Jb\x9bc"
    row = msgspec.structs.replace(REQUESTS[0], request_id=name, stage="a\x1bc")
    event = CacheEvent("finished", request_id=name, reason=name)
    picture.add(CacheUpdate(0, 1.0, SNAPSHOT.setup, BLOCKS, None, [row], [], COUNTERS, [event]))
    lines = picture.lines(120, 30)
    assert sum("a?[2Jb?c" in line for line in lines) == 2
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("is_coloured", [False, True])
@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (40, 12), (20, 10), (1, 1)])
def test_no_line_is_wider_than_the_terminal(width: int, height: int, is_coloured: bool) -> None:
    picture = Picture(CacheMirror(), is_coloured=is_coloured)
    setup = CacheSetup(16, 100_000, 0, 1, 4)
    events = [CacheEvent("finished", request_id="r" * 300)] * 30
    picture.add(CacheUpdate(0, 0.0, setup, BLOCKS, None, REQUESTS, [], COUNTERS, events))
    lines = [re.sub(r"\x1b\[\d+m", "", line) for line in picture.lines(width, height)]
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    assert "quire 0.0 tokens/s".startswith(lines[0].strip()[:18])
    if width >= 40:
        assert {"preemptions", "pinned"} <= set(" ".join(lines).split())


def test_a_large_cache_fits_and_shows_the_busiest_of_blocks() -> None:
    picture = Picture(CacheMirror(), is_coloured=False)
    setup = CacheSetup(16, 100_000, 0, 1, 4)
    picture.add(CacheUpdate(0, 0.0, setup, BLOCKS, None, REQUESTS, [], COUNTERS))
    lines = picture.lines(100, 24)
    assert len(lines) <= 24
    assert lines[2][0] == "█"
    assert picture.is_whole


def test_a_snapshot_is_complete_once_all_blocks_that_are_not_free_have_been_sent() -> None:
    picture = Picture(CacheMirror(), is_coloured=False)
    assert not picture.is_whole
    picture.add(CacheUpdate(0, 0.0, CacheSetup(16, 8, 0, 1, 4), None, None, [], [], COUNTERS))
    assert not picture.is_whole
    columns = {name: getattr(BLOCKS, name) for name in BLOCKS.__struct_fields__}
    picture.add(CacheUpdate(1, 0.1, device=BlockColumns(**{name: values[:2] for name, values in columns.items()})))
    assert not picture.is_whole  # both in use are there, the cached one is not
    picture.add(CacheUpdate(2, 0.2, device=BlockColumns(**{name: values[2:] for name, values in columns.items()})))
    assert picture.is_whole


def test_an_encoder_has_no_blocks_to_be_in_use() -> None:
    picture = Picture(CacheMirror(), is_coloured=False)
    picture.add(CacheUpdate(0, 0.0, CacheSetup(16, 0, 0, 0, 4), None, None, [], [], COUNTERS | {"used_blocks": 0}))
    assert "cache 0.0% of 0 blocks" in picture.lines(100, 24)[1]

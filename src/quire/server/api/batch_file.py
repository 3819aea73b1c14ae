"""Batch files in the format of OpenAI's Batch API, processed by the server's own application.

Results are written to a partial file beside the output as soon as they are made, in any order, each after the index of
its line. A run that was interrupted can be continued from this file. When all lines are done, the results are sorted
and the output file is created.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import hashlib
import os
import re
import secrets
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.types import ASGIApp, Message

from quire.common.errors import ConfigError, EngineDeadError, QuireError
from quire.common.faults import fault_write
from quire.common.files import keep_permissions, replacement
from quire.server.http.bodies import json_fault

MAX_FRAME_BYTES = 64 * 1024
"""Maximum size of a line, not counting its body."""
_STREAMS_BY_DEFAULT = ("/api/chat", "/api/generate")
_READ_BYTES = 1024**2


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchResponse(msgspec.Struct):
    """The server's response, which may be an error."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchError(msgspec.Struct):
    """Why there is no response."""

    code: str
    message: str
    line: int = 0
    """Its number in the file, from 1 on."""


class BatchResult(msgspec.Struct, kw_only=True):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def is_answer(self) -> bool:
        """Whether the line succeeded."""
        return self.response is not None and self.response.status_code < 400


class _CustomId(msgspec.Struct):
    custom_id: str | None = None


class _Body(msgspec.Struct):
    stream: Any = None
    background: Any = None


def read_lines(source: Path, max_body_bytes: int, num_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """The number of each line that is not blank, from 1 on, and the line; None for a line that is too long.

    Only the first `num_bytes` of the file are read.
    """
    limit = max_body_bytes + MAX_FRAME_BYTES
    with source.open("rb") as file:

        def read() -> bytes:
            return file.readline(min(limit, num_bytes - file.tell()))

        for number, line in enumerate(iter(read, b""), 1):
            if len(line) == limit and not line.endswith(b"\n"):
                while (rest := read()) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            elif line.strip():
                yield number, line.removeprefix(codecs.BOM_UTF8)


@dataclass(frozen=True, kw_only=True)
class BatchRun:
    """How a batch file is processed."""

    app: ASGIApp
    paths: Collection[str]
    """Paths that lines may name."""
    is_running: Callable[[], bool]
    """Whether an engine runs or is being restarted."""
    max_in_flight: int
    """Lines that are processed at the same time."""
    max_body_bytes: int

    async def run(self, source: Path, partial: PartialFile, progress: Callable[[], object]) -> None:
        """Process the lines without a result; `progress` is called after each.

        Raises EngineDeadError if the engine ends, QuireError if an answer cannot be kept or the input has changed; the
        lines without an answer are then left for another run.
        """
        lines = _numbered(read_lines(source, self.max_body_bytes, partial.num_bytes))

        async def work() -> None:
            for index, number, line, is_duplicate in lines:
                await asyncio.sleep(0)  # Ctrl-C is noticed here, even if no line needs an answer
                partial.check_input(index, number, line)
                if partial.has(index):
                    continue
                result = await self._result(line, is_duplicate)
                if result.error is not None:
                    result.error.line = number
                if not result.is_answer and not self.is_running():
                    raise EngineDeadError("the engine process has ended")
                partial.add(index, result)
                progress()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self.max_in_flight):
                    group.create_task(work())
        except* QuireError as errors:
            raise errors.exceptions[0] from None

    async def _result(self, line: bytes | None, is_duplicate: bool) -> BatchResult:
        result = BatchResult(id=f"batch_req_{secrets.token_hex(12)}", custom_id=_custom_id(line))
        request = self._request(line, is_duplicate)
        if isinstance(request, BatchError):
            result.error = request
            return result
        status, headers, body = await call(self.app, request.url, bytes(request.body))
        kind = headers.get("content-type", "").partition(";")[0]
        if kind == "application/json":
            result.response = BatchResponse(status, headers.get("x-request-id", ""), msgspec.Raw(body))
        else:
            message = f"the response has status {status} and the type {kind!r}: only JSON fits into a line"
            result.error = BatchError("not_json", message)
        return result

    def _request(self, line: bytes | None, is_duplicate: bool) -> BatchRequest | BatchError:
        if line is None:
            message = f"the line is longer than {self.max_body_bytes:,} bytes, the maximum size of a body"
            return BatchError("line_too_long", message)
        try:
            request = msgspec.json.decode(line, type=BatchRequest)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return BatchError("invalid_line", f"the line is not a valid request: {json_fault(error)}")
        if is_duplicate:
            message = f"custom_id={request.custom_id[:100]!r} was used by an earlier line; it must be unique"
            return BatchError("duplicate_custom_id", message)
        return self._refusal(request) or request

    def _refusal(self, request: BatchRequest) -> BatchError | None:
        if request.method.upper() != "POST":
            return BatchError("invalid_method", f"method={request.method[:20]!r}: must be POST")
        if request.url not in self.paths:
            message = f"url={request.url[:100]!r}: must be one of {', '.join(sorted(self.paths))}"
            return BatchError("invalid_url", message)
        try:
            body = msgspec.json.decode(request.body, type=_Body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the endpoint says what is wrong with the body
        if body.stream is None and request.url in _STREAMS_BY_DEFAULT:
            message = f"stream: must be false, since {request.url} streams by default; not supported in batch files"
            return BatchError("invalid_body", message)
        for name in ("stream", "background"):
            if getattr(body, name):
                return BatchError("invalid_body", f"{name}: not supported in batch files")
        return None


def _numbered(lines: Iterable[tuple[int, bytes | None]]) -> Iterator[tuple[int, int, bytes | None, bool]]:
    """The index of each line, its number in the file, and whether an earlier one has the same custom_id."""
    seen: set[bytes | None] = set()
    for i, (number, line) in enumerate(lines):
        custom_id = _custom_id(line)
        key = None if custom_id is None else hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        yield i, number, line, key is not None and key in seen
        seen.add(key)


def _custom_id(line: bytes | None) -> str | None:
    try:
        return None if line is None else msgspec.json.decode(line, type=_CustomId).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


async def call(app: ASGIApp, path: str, body: bytes) -> tuple[int, Mapping[str, str], bytes]:
    """POST JSON to an ASGI application in this process. Returns status, headers (names in lower case) and body."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }  # fmt: skip
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    status, headers, chunks = 500, {}, []

    async def receive() -> Message:
        if requests:
            return requests.pop()
        await asyncio.get_running_loop().create_future()  # this client never leaves
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            chunks.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, b"".join(chunks)


class PartialFile:
    """Results in the order of completion, each after its line's index.

    The first line is the digest and the size of the input. The file is locked until `close`: only one run writes it.
    """

    def __init__(self, output: Path, source: Path, max_body_bytes: int, *, resume: bool) -> None:
        """Create the file, or with `resume` continue an existing one. Raises ConfigError."""
        self._source = source
        self._output = Path(os.path.realpath(output))  # a symbolic link stays, and what it points to is written
        self.path = self._output.with_name(self._output.name + ".partial")
        self.num_failed = 0
        """Number of results that are not answers."""
        try:
            self._file: BinaryIO = self.path.open("a+b", buffering=0)
            keep_permissions(self._output, self._file)
        except OSError as error:
            raise ConfigError(f"the output cannot be written: {error}") from error
        try:
            self._lock()
            self._begin(source, max_body_bytes, resume)
        except BaseException:
            self.close()
            raise

    @property
    def num_lines(self) -> int:
        """Number of lines of the input."""
        return len(self._offsets)

    @property
    def num_done(self) -> int:
        """Number of lines that have a result."""
        return self.num_lines - self._offsets.count(0)

    def has(self, index: int) -> bool:
        """Whether the line with this index has a result."""
        return self._offsets[index] != 0

    def check_input(self, index: int, number: int, line: bytes | None) -> None:
        """Raises QuireError unless the line with this index and number is as it was when the run began."""
        if index >= self.num_lines or hash(line) != self._hashes[index]:
            raise QuireError(
                f"line {number} of {self._source} was changed during the run: restore the file and continue with "
                f"--resume, or delete {self.path}"
            )

    def add(self, index: int, result: BatchResult) -> None:
        """Write the result of a line; the operating system has it when this returns."""
        offset = self._size
        self._write(b"%d %b\n" % (index, msgspec.json.encode(result)))
        self._offsets[index] = offset
        self.num_failed += not result.is_answer

    def finish(self) -> None:
        """Write the whole output file atomically and delete the partial file. Raises QuireError."""
        with self._writing(), replacement(self._output) as file, self._reading() as results:
            for i, offset in enumerate(self._offsets):
                results.seek(offset)
                index, _, result = results.readline().partition(b" ")
                if index != b"%d" % i:
                    raise QuireError(f"{self.path} or the input was changed during the run: result {i} is missing")
                fault_write("batch.write", file.write, result)
        self.path.unlink(missing_ok=True)  # before the lock ends: a run that waits for it must not find the file
        self.close()

    def close(self) -> None:
        """Close the file and keep it for a later run."""
        self._file.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_own = os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_own = False  # another run is writing it, or has just ended and deleted it
        except OSError:
            return  # a file system without locks
        if not is_own:
            raise ConfigError(f"{self.path} cannot be used now: another run is writing it")

    def _begin(self, source: Path, max_body_bytes: int, resume: bool) -> None:
        with self._reading() as file:
            head = file.readline()
        if head and not resume:
            raise ConfigError(f"{self.path} belongs to an interrupted run: continue with --resume, or delete it")
        found = re.fullmatch(rb"\w+ (\d{1,18})\n", head)
        self.num_bytes = int(found[1]) if found else source.stat().st_size
        """Size of the input when the run began. Lines that are appended later are not part of the run."""
        expected = _head(source, self.num_bytes)
        if head not in (b"", expected):
            raise ConfigError(f"{self.path} belongs to another input file: delete it, or use that file")
        self._hashes = array("q", (hash(line) for _, line in read_lines(source, max_body_bytes, self.num_bytes)))
        self._offsets = array("Q", bytes(8 * len(self._hashes)))
        """Offset of each result in the file; 0 if there is none."""
        self._size = 0
        if head:
            self._find_results()
        else:
            self._write(expected)

    def _reading(self) -> BinaryIO:
        """The file from its beginning on, also if it is no longer at its path."""
        self._file.seek(0)
        return open(self._file.fileno(), "rb", closefd=False)

    def _write(self, data: bytes) -> None:
        """Write all of it, or undo the write, because further lines may follow."""
        with self._writing():
            try:
                left = data
                while left:  # a disk that is full takes a part
                    left = left[fault_write("batch.write", self._file.write, left) :]
            except OSError:
                self._file.truncate(self._size)
                raise
        self._size += len(data)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise QuireError(
                f"the responses cannot be written: {error}; free disk space and continue with --resume"
            ) from error

    def _find_results(self) -> None:
        """Find the existing results. An incomplete last line is removed; lines that a power failure damaged stay, and
        what they answered is processed again."""
        with self._reading() as file:
            self._size = len(file.readline())
            while (line := file.readline()).endswith(b"\n"):
                head, _, rest = line.partition(b" ")
                with suppress(ValueError, RecursionError):
                    index, result = int(head), msgspec.json.decode(rest, type=BatchResult)
                    if index in range(self.num_lines) and not self.has(index):
                        self._offsets[index] = self._size
                        self.num_failed += not result.is_answer
                self._size += len(line)
        self._file.truncate(self._size)


def _head(source: Path, num_bytes: int) -> bytes:
    """The first line of a partial file: the digest of the input's first `num_bytes`, and their number."""
    digest, left = hashlib.sha256(), num_bytes
    with source.open("rb") as file:
        while piece := file.read(min(left, _READ_BYTES)):
            digest.update(piece)
            left -= len(piece)
    return b"%b %d\n" % (digest.hexdigest().encode(), num_bytes)

"""All targets of reliability.fuzz; this file has the parsers of connections and of a model's output."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache, partial
from io import BytesIO, StringIO
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
from uvicorn.config import Config
from uvicorn.server import ServerState

from quire.cli.terminal import top
from quire.common.errors import InvalidParamsError, QuireError, RequestError
from quire.common.outputs import AdapterStats, DraftStats, EngineStats
from quire.common.params import SamplingParams
from quire.engine.process.engine_process import read_messages
from quire.engine.process.messages import (
    Abort,
    AddRequest,
    AddScoring,
    CacheFrame,
    RequestDelta,
    Rows,
    SequenceDelta,
    SetCacheView,
    Start,
    StartFailed,
    StepDone,
    to_frame,
)
from quire.engine.view.cache_frame import BlockColumns, CacheEvent, CacheSetup, CacheUpdate, RequestRow
from quire.interfaces.async_llm.engine_client import EngineClient
from quire.interfaces.launch.link import ProcessLink
from quire.server.api.chat.events import ContentDelta, ReasoningDelta
from quire.server.api.chat.protocol import Tool, ToolChoice
from quire.server.api.tools.choice import check_tools, tool_choice_structure
from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.server.api.tools.output_parser import ForcedTools, OutputParser
from quire.server.api.tools.parsed import Parsed
from quire.server.http import sse
from quire.server.http.protocol import limited_protocol
from reliability import fuzz_files, fuzz_gguf, fuzz_packed, fuzz_requests, fuzz_vocabularies
from reliability.fuzz_target import JSON, Target, refusal, tried

# --- a model's output


_OUTPUTS: list[dict[str, Any]] = [
    {"reasoning": REASONING_FORMATS["think"]},
    {"reasoning": REASONING_FORMATS["mistral"], "tools": TOOL_FORMATS["mistral"]},
    {"reasoning": REASONING_FORMATS["think"].after("<think>"), "tools": TOOL_FORMATS["hermes"]},
    {"tools": TOOL_FORMATS["hermes"]},
    {"tools": TOOL_FORMATS["llama3_json"]},
    {"tools": TOOL_FORMATS["mistral"], "max_calls": 1},
    {"forced": ForcedTools()},
    {"forced": ForcedTools("f")},
]


def output(data: bytes) -> str:
    """Check that a chat's output is parsed the same however it is split, and that calls have a name and an object."""
    if len(data) < 2:
        return "too short"
    text, options = data[2:].decode("utf-8", "replace"), _OUTPUTS[data[0] % len(_OUTPUTS)]
    whole = _read_output([text], options)
    step = 1 + data[1] % 16
    assert _read_output([text[i : i + step] for i in range(0, len(text), step)], options) == whole, "cut differently"
    _, _, calls = whole
    for name, arguments in calls:
        assert name
        assert arguments.lstrip().startswith("{")
    return "" if calls else f"reasoning {bool(whole[0])}, content {bool(whole[1])}"


def _read_output(pieces: Sequence[str], options: dict[str, Any]) -> tuple[str, str, list[tuple[str, str]]]:
    parser = OutputParser(**options, new_id=lambda: "id")
    found = list[Parsed]()
    for piece in pieces:
        found += parser.feed(piece)
    found += parser.finish()
    reasoning, content, calls = "", "", dict[int, tuple[str, str]]()
    for item in found:
        if isinstance(item, ContentDelta):
            content += item.text
        elif isinstance(item, ReasoningDelta):
            reasoning += item.text
        else:
            name, arguments = calls.get(item.tool_index, ("", ""))
            calls[item.tool_index] = name + (item.name or ""), arguments + item.arguments
    return reasoning, content, list(calls.values())


def _output_corpus() -> list[bytes]:
    texts = [
        "<think>\nlet me see</think>\n\nYes.", "[THINK]a[/THINK]b", '{"a": "é\U0001f600"}',
        '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}]"}]}}\n</tool_call>',
        '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "[TOOL_CALLS]f[CALL_ID]x[ARGS]{}",
        '<|python_tag|>{"name": "f", "parameters": {}}; ',
        '[{"name": "f", "parameters": {"a": -0.5e+3, "b": "\\u00e9\\n", "c": null}}]',
    ]  # fmt: skip
    return [bytes([kind, 3]) + text.encode() for kind in range(len(_OUTPUTS)) for text in texts]


# --- tools of requests


class _ToolFields(msgspec.Struct):
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None


def tools(data: bytes) -> str:
    """Check that tools that pass validation can be turned into a grammar."""
    try:
        given = msgspec.json.decode(data, type=_ToolFields)
    except (ValueError, RecursionError):
        return "malformed"
    try:
        check_tools(given.tools, given.tool_choice)
        tool_choice_structure(given.tools, given.tool_choice)
    except (InvalidParamsError, RecursionError) as error:  # a server answers both with 400
        return refusal(error)
    return ""


def _tools_corpus() -> list[bytes]:
    tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
    defs = {"$defs": {"a": {"type": "integer"}}, "properties": {"x": {"$ref": "#/$defs/a"}}}
    other = {"type": "function", "function": {"name": "g", "parameters": defs}}
    choices: list[Any] = ["auto", "required", "none", {"type": "function", "function": {"name": "f"}}, None]
    return [json.dumps({"tools": [tool, other], "tool_choice": choice}).encode() for choice in choices]


# --- events of streams


def events(data: bytes) -> str:
    """Check that a written event is one event to a reader, and that `quire top` reads anything without crashing."""
    text = data.decode("utf-8", "replace")
    framed = sse.frame(msgspec.json.encode(text))
    assert [json.loads(line[6:]) for line in framed.decode().split("\n") if line] == [text]
    assert framed.count(b"\n") == 2
    options = argparse.Namespace(url="http://localhost", api_key=None, model=None, engine=0, once=True)
    shown = StringIO()
    with mock.patch.object(urllib.request, "urlopen", return_value=BytesIO(data)), redirect_stdout(shown):
        try:
            top.run(options)
        except QuireError as error:
            return refusal(error)
    assert shown.getvalue().replace("\n", "").isprintable()
    return ""


_COUNTERS = (
    "running", "waiting", "swapped", "used_blocks", "generated_tokens", "prefix_hit", "prefix_queried", "preemptions",
    "preemptions_by_swap", "prefix_evicted",
)  # fmt: skip


def _events_corpus() -> list[bytes]:
    columns = BlockColumns([0, 1], [1, 2], [0, 1], [4, 4], [0, 1], [0, 0], [5, 6], [0, 5], [[], [0]])
    row = RequestRow(0, "id", "running", "decode", "tenant", 0, 1, 8, 0, 9, 1, 16, 1, 0)
    counters = dict.fromkeys(_COUNTERS, 1)
    whole = CacheUpdate(
        0, 1.0, CacheSetup(4, 8, 0, 1, 4), columns, None, [row], [], counters, [CacheEvent("started")], 0
    )
    more = CacheUpdate(1, 2.0, None, columns, None, [], [0], {"generated_tokens": 5, "used_blocks": 9})
    made = [sse.frame(msgspec.json.encode(update)) for update in (whole, more)]
    return [*made, b"".join(made), sse.KEEP_ALIVE + made[0] + sse.DONE]


# --- messages between server and engine


def messages(data: bytes) -> str:
    """Check that reading malformed messages ends, and that it gives the same result however the data is split."""
    inbox: SimpleQueue[Any] = SimpleQueue()
    with _quiet():
        read_messages(BytesIO(data), inbox)
    taken = list(iter(inbox.get, None))
    assert inbox.empty()
    for message in taken:
        if isinstance(message, AddRequest):
            tried(partial(msgspec.msgpack.decode, message.params, type=SamplingParams), RequestError, RecursionError)
    with _quiet():
        received = _loop().run(_read_as_client([data]))
        assert _loop().run(_read_as_client(_cut(data))) == received, "cut differently"
        assert _loop().run(_read_as_client(received)) == received, "changed when sent again"
    return "" if received or taken else "nonsense"


async def _read_as_client(pieces: Sequence[bytes]) -> list[bytes]:
    link: Any = SimpleNamespace(reader=asyncio.StreamReader(), pid=None, clock_s=ProcessLink.clock_s)
    client = EngineClient(link, hang_timeout_s=None)

    async def feed() -> None:
        for piece in pieces:
            link.reader.feed_data(piece)
            await asyncio.sleep(0)
        link.reader.feed_eof()

    feeding, received = asyncio.create_task(feed()), list[bytes]()
    while (message := await client._receive()) is not None:
        received.append(to_frame(message))
        deltas = message.deltas if isinstance(message, StepDone) else []
        for rows in [sequence.logprobs for delta in deltas for sequence in delta.sequences if sequence.logprobs]:
            tried(rows.unpack)
    await feeding
    return received


def _messages_corpus() -> list[bytes]:
    params = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(stop_token_ids=[1], logit_bias={5: 1.0})))
    rows = Rows(b"\1\0\0\0", b"\0\0\0\0", b"\1\0\0\0")
    sequence = SequenceDelta(0, [5], "stop", 5, rows)
    counts: dict[str, Any] = {each.name: 0 for each in dataclasses.fields(EngineStats) if each.type == "int"}
    drafts = {"ngram": DraftStats([1], 2, 3)}
    stats = EngineStats(**counts, prefix_cache={"hit": 1}, adapters={"a": AdapterStats(1)}, drafts=drafts)
    sent: list[Any] = [
        Start({"model": "quire-tiny", "max_model_len": 64}), AddRequest(1, "a", [5, 6], "salt", 1.0, False, params),
        AddScoring(2, "b", [5, 6], "", 1), Abort(["a"]), SetCacheView(True), StartFailed("ConfigError", "no"),
        StepDone([RequestDelta(1, [sequence], True, 3, None, rows, "error", "kind")], stats), CacheFrame(b"{}"),
    ]  # fmt: skip
    made = [to_frame(message) for message in sent]
    return [*made, b"".join(made[:5])]


# --- bytes of connections


_MAX_HEAD_BYTES = 2048


class _Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written, self.is_closed = b"", False

    def write(self, data: Any) -> None:
        self.written += b"" if self.is_closed else data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def pause_reading(self) -> None:
        """Do nothing, because all data is already there."""

    resume_reading = pause_reading


@cache
def _http_config() -> Config:
    config = Config(_answer, log_config=None, lifespan="off", ws="none")
    config.load()
    return config


_asked: list[list[Any]] = []


async def _answer(scope: Any, receive: Any, send: Any) -> None:
    request = [scope["method"], scope["raw_path"], scope["headers"], b""]
    while (message := await receive())["type"] == "http.request":
        request[-1] += message["body"]
        if not message["more_body"]:
            _asked.append(request)
            break
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"{}"})


async def _talk(pieces: Sequence[bytes]) -> list[list[Any]]:
    _asked.clear()
    state, transport = ServerState(), _Transport()
    kind = limited_protocol(_MAX_HEAD_BYTES, 60.0)
    protocol = kind(config=_http_config(), server_state=state, app_state={})
    protocol.connection_made(transport)
    for piece in pieces:
        if not transport.is_closing():
            protocol.data_received(piece)
        for _ in range(6):  # let tasks run that are ready
            await asyncio.sleep(0)
    protocol.connection_lost(None)
    if state.tasks:
        await asyncio.wait(state.tasks)
    assert not transport.written or transport.written.startswith(b"HTTP/1.1 ")
    return _asked.copy()


def http(data: bytes) -> str:
    """Check that the first request is the same however the bytes are split, and that heads are within their limit.

    Malformed HTTP is answered or the connection is closed.
    """
    whole, cut = _loop().run(_talk([data])), _loop().run(_talk(_cut(data)))
    for _, path, headers, _ in whole:
        assert len(path) + sum(len(name) + len(value) for name, value in headers) <= _MAX_HEAD_BYTES
    assert cut[:1] == whole[:1], "cut differently"
    return "" if whole else "no request"


def _http_corpus() -> list[bytes]:
    head = b"POST /v1/completions?a=b HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    whole = head + b"content-length: 2\r\n\r\n{}"
    chunked = head + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n1;a=b\r\n}\r\n0\r\nx: y\r\n\r\n"
    offer = b"GET / HTTP/1.1\r\nhost: a\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\n"
    old = b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n"
    expects = head + b"expect: 100-continue\r\ncontent-length: 0\r\n\r\n"
    return [whole, chunked, offer, old, whole * 3, offer + whole, expects]


# --- all targets


@cache
def _loop() -> asyncio.Runner:
    return asyncio.Runner()


def _cut(data: bytes) -> list[bytes]:
    """Split data into a few pieces, at places that depend on its length."""
    step = 1 + len(data) // (2 + len(data) % 11)
    return [data[i : i + step] for i in range(0, len(data), step)]


@contextmanager
def _quiet() -> Iterator[None]:
    with (
        mock.patch("quire.engine.process.engine_process.logger"),
        mock.patch("quire.interfaces.async_llm.engine_client.logger"),
    ):
        yield


_TAGS = b'<tool_call> </tool_call> <think> </think> [TOOL_CALLS] [ARGS] <|python_tag|> {"name":"f","arguments":{ ;'
_HTTP = b"\r\n|\n|\r\n\r\n|:|content-length: |transfer-encoding: chunked\r\n|HTTP/1.1|0\r\n\r\n|CONNECT |\0|upgrade: "
TARGETS = {
    **fuzz_files.TARGETS,
    **fuzz_gguf.TARGETS,
    **fuzz_packed.TARGETS,
    **fuzz_vocabularies.TARGETS,
    **fuzz_requests.TARGETS,
    "output": Target(output, _output_corpus, (*JSON, *_TAGS.split())),
    "tools": Target(tools, _tools_corpus, (*JSON, *b"$ref #/$defs/a function parameters required name".split())),
    "events": Target(events, _events_corpus, (*JSON, b"\n\n", b"\r\n", *b"data: : event: setup gone [7]".split())),
    "messages": Target(messages, _messages_corpus, (b"\xc0", b"\xff", b"\x91", b"\xdf\xff\xff\xff\xff", b"\xa4type")),
    "http": Target(http, _http_corpus, (*_HTTP.split(b"|"), b"x" * 2100)),
}

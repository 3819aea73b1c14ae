"""Watching the cache: one stream for each watcher, over one view in the engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message

from quire import EngineDeadError, SamplingParams
from quire.engine.view.cache_frame import OWNED, CacheMirror, CacheUpdate
from quire.server.app import make_app
from quire.server.config import ServerArgs
from quire.server.http.auth import ApiKeys, callers_are_one_tenant
from quire.server.operations import debug
from tests.async_llm.door import Door
from tests.server.in_process import state_over

PATH = "/debug/cache/events"


class WatchedLLM:
    """Gives each watcher frames from a script; None ends them, as for a watcher who is too slow."""

    adapters = ()
    group = SimpleNamespace(engines=[None, None])
    tokenizer = SimpleNamespace(chat_templates={})

    def __init__(self, *scripts: list[bytes | Exception | None]) -> None:
        self.scripts = list(scripts)
        self.tokenizer = SimpleNamespace(chat_templates={})
        self.num_open = 0

    async def watch_cache(self, engine: int) -> AsyncGenerator[bytes, None]:
        self.num_open += 1
        self.watched = engine
        try:
            for frame in self.scripts.pop(0):
                if frame is None:
                    return
                if isinstance(frame, Exception):
                    raise frame
                yield frame
            await asyncio.Event().wait()
        finally:
            self.num_open -= 1


def app_over(llm: Any) -> ASGIApp:
    return make_app(state_over(llm, "tiny"))


class Watcher:
    """One client of the stream."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Message] = asyncio.Queue()
        self.left = asyncio.Event()
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.has_asked = False

    async def receive(self) -> Message:
        if not self.has_asked:
            self.has_asked = True
            return {"type": "http.request", "body": b"", "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def next(self) -> bytes:
        """The next event, or the whole body of an answer that is none."""
        message = await asyncio.wait_for(self.messages.get(), 60)
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
            return await self.next()
        body: bytes = message["body"]
        return await self.next() if body.startswith(b":") else body


@asynccontextmanager
async def watching(app: ASGIApp, query: bytes = b"") -> AsyncIterator[Watcher]:
    watcher = Watcher()
    scope = {
        "type": "http", "method": "GET", "path": PATH, "raw_path": PATH.encode(), "query_string": query, "headers": [],
        "root_path": "", "scheme": "http", "http_version": "1.1", "server": None, "client": None,
    }  # fmt: skip
    task = asyncio.create_task(app(scope, watcher.receive, watcher.messages.put))
    try:
        yield watcher
    finally:
        watcher.left.set()
        await asyncio.wait_for(task, 60)


def test_frames_are_handed_through_until_the_watcher_leaves() -> None:
    llm = WatchedLLM([b'{"number":0}', b'{"number":1}'])

    async def watch() -> None:
        async with watching(app_over(llm)) as watcher:
            assert await watcher.next() == b'data: {"number":0}\n\n'
            assert await watcher.next() == b'data: {"number":1}\n\n'
            assert watcher.status == 200
            assert watcher.headers[b"content-type"].startswith(b"text/event-stream")
            assert llm.num_open == 1
        assert llm.num_open == 0

    asyncio.run(watch())


def test_the_engine_that_is_watched_is_chosen() -> None:
    async def watch() -> None:
        for query, number in ((b"", 0), (b"engine=1", 1)):
            llm = WatchedLLM([b"{}"])
            async with watching(app_over(llm), query) as watcher:
                await watcher.next()
            assert llm.watched == number
        for wrong in (b"2", b"-1", b"x", b""):
            async with watching(app_over(WatchedLLM([])), b"engine=" + wrong) as watcher:
                assert b"engine='" + wrong + b"': must be from 0 to 1" in await watcher.next()
                assert watcher.status == 400
        alone = WatchedLLM([])
        alone.group = SimpleNamespace(engines=[None])
        async with watching(app_over(alone), b"engine=3") as watcher:
            assert b"engine='3': must be 0, since the model has one engine" in await watcher.next()

    asyncio.run(watch())


def test_a_watcher_who_was_too_slow_begins_anew() -> None:
    llm = WatchedLLM([b'{"number":0}', None], [b'{"number":7}'])

    async def watch() -> None:
        async with watching(app_over(llm)) as watcher:
            assert [await watcher.next(), await watcher.next()] == [
                b'data: {"number":0}\n\n',
                b'data: {"number":7}\n\n',
            ]
            assert llm.num_open == 1

    asyncio.run(watch())


def test_the_number_of_watchers_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "MAX_WATCHERS", 1)
    app = app_over(WatchedLLM(*[[b"{}"]] * 3))

    async def watch() -> None:
        async with watching(app) as first, watching(app) as second:  # at the same time
            await first.next()
            assert b"too_many_watchers" in await second.next()
            assert second.status == 429
            async with watching(app) as late:
                assert b"too_many_watchers" in await late.next()
        async with watching(app, b"engine=9") as wrong:
            await wrong.next()
        async with watching(app) as early:  # leaves before its stream has begun
            early.left.set()
        async with watching(app) as third:
            assert await third.next() == b"data: {}\n\n"

    asyncio.run(watch())


def test_the_end_of_the_engine_is_the_last_event() -> None:
    llm = WatchedLLM([b"{}", EngineDeadError("it has died")])

    async def watch() -> None:
        async with watching(app_over(llm)) as watcher:
            await watcher.next()
            assert b"error" in await watcher.next()

    asyncio.run(watch())


class ReadLLM:
    """Says which blocks were read."""

    adapters = ()
    group = SimpleNamespace(engines=[None, None])
    tokenizer = SimpleNamespace(chat_templates={}, decode_token=lambda token: f"<{token}>")

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[int]]] = []

    async def block_tokens(self, tier: int, block_ids: list[int], engine: int) -> list[list[int]]:
        self.asked.append((tier, block_ids))
        return [[block_id, 5] if block_id else [] for block_id in block_ids]


def read_blocks(query: str, *, shows_tokens: bool = True) -> tuple[int, Any, ReadLLM]:
    llm = ReadLLM()
    state = state_over(llm, "tiny")
    state.shows_tokens = lambda: shows_tokens
    answer = TestClient(make_app(state)).get(f"/debug/cache/blocks{query}")
    return answer.status_code, answer.json(), llm


def test_the_tokens_of_blocks_are_read_with_their_texts() -> None:
    status, body, llm = read_blocks("?ids=3,0")
    assert (status, llm.asked) == (200, [(0, [3, 0])])
    assert body["blocks"] == [
        {"id": 3, "token_ids": [3, 5], "texts": ["<3>", "<5>"]},
        {"id": 0, "token_ids": [], "texts": []},
    ]
    assert read_blocks("?tier=host&ids=7")[2].asked == [(1, [7])]


@pytest.mark.parametrize(
    "query",
    ["", "?ids=", "?ids=a", "?ids=-1", "?ids=1.5", "?ids=1,,2", "?ids=9999999999", "?ids=\u0661", "?tier=disk&ids=1"]
    + [f"?ids={','.join(map(str, range(n)))}" for n in (65, 5000)],
)
def test_other_blocks_than_there_can_be_are_refused(query: str) -> None:
    status, body, llm = read_blocks(query)
    assert (status, llm.asked) == (400, [])
    assert body["error"]["param"] in ("ids", "tier")


def test_tokens_are_hidden_where_callers_may_be_different_tenants() -> None:
    status, body, llm = read_blocks("?ids=1", shows_tokens=False)
    assert (status, llm.asked) == (403, [])
    assert body["error"]["code"] == "tokens_hidden"


@pytest.mark.parametrize(
    ("keys", "args", "shown"),
    [
        ((), {}, True),
        ((), {"host": "0.0.0.0", "allow_unauthenticated": True}, False),
        (("one",), {"host": "0.0.0.0"}, True),
        (("one", "two"), {}, False),
    ],
)
def test_all_callers_are_one_tenant_with_one_key_or_none_on_this_machine(keys, args, shown, monkeypatch) -> None:
    monkeypatch.delenv("QUIRE_API_KEY", raising=False)
    args = ServerArgs(api_key=keys, **args)
    assert callers_are_one_tenant(args, ApiKeys.load(args)) is shown


def test_what_a_running_and_an_ended_request_have_computed_is_read_from_the_engine() -> None:
    door = Door(num_gpu_blocks_override=64, max_num_seqs=2, num_threads=1, max_model_len=512)
    prompt = list(range(40, 75))

    async def read() -> tuple[list[list[int]], list[list[int]]]:
        params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        async for output in door.llm.generate({"prompt_token_ids": prompt}, params, request_id="a"):
            if len(output.outputs[0].token_ids) >= 3:
                running = await door.llm.block_tokens(0, range(64))
                break
        return running, await door.llm.block_tokens(0, [*range(64), 64, 10**6])

    try:
        running, ended = door.run(read())
        assert door.run(door.llm.block_tokens(1, [0])) == [[]]
    finally:
        door.close()
    assert prompt[:16] in running
    assert prompt[16:32] in running
    assert any(tokens[:3] == prompt[32:] for tokens in running), "a block that is being filled"
    assert prompt[:16] in ended
    assert ended[64:] == [[], []]


def test_watchers_see_a_second_request_share_the_blocks_of_the_first() -> None:
    door = Door(num_gpu_blocks_override=256, max_num_seqs=4, num_threads=1)
    prompt = {"prompt_token_ids": list(range(40, 90))}
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True, output_kind="final_only")

    async def generate(name: str) -> None:
        async for _ in door.llm.generate(prompt, params, request_id=name):
            pass

    def is_shared(mirror: CacheMirror) -> bool:
        return any(row["states"] >= OWNED and len(row["owners"]) == 2 for row in mirror.tiers["device"].values())

    async def watch() -> CacheMirror:
        """What is told until the two requests share a block, and then have gone."""
        mirror, requests = CacheMirror(), None
        async with watching(app_over(door.llm)) as watcher, watching(app_over(door.llm)) as other:
            await other.next()
            while requests is None or not requests.done() or mirror.requests:
                event = await watcher.next()
                update = msgspec.json.decode(event.removeprefix(b"data: "), type=CacheUpdate)
                if mirror.setup is None and update.setup is None:
                    continue  # meant for the other one
                mirror.apply(update)
                if requests is None:
                    assert mirror.setup.num_blocks == 256
                    assert mirror.tiers["device"] == {}
                    requests = asyncio.gather(generate("a"), generate("b"))
                elif is_shared(mirror) and not requests.done():
                    requests.cancel()
            with pytest.raises(asyncio.CancelledError):  # else they ended before anything was seen to be shared
                await requests
        return mirror

    try:
        mirror = door.run(watch())
    finally:
        door.close()
    hits = [row["hits"] for row in mirror.tiers["device"].values() if row["hashes"]]
    assert max(hits) == 1 or mirror.counters["prefix_hit_joined"] > 0

"""The web page over a made-up cache of any size, for its tests, its benchmark and its screenshots.

Requests of a few families, each with a prompt that its members share, come and go; blocks are filled, shared, cached
and evicted as in an engine, but nothing is computed. Equal sizes make equal frames.
"""

import asyncio
import random
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import uvicorn

from quire.engine.adapters import AdapterTable
from quire.engine.view.cache_frame import (
    CACHED,
    FREE,
    OWNED,
    PINNED,
    BlockColumns,
    CacheEvent,
    CacheSetup,
    CacheUpdate,
    RequestRow,
)  # fmt: skip
from quire.server.app import make_app
from quire.server.config import ServerArgs
from quire.server.http.state import ServerState
from quire.server.models.pool import ModelPool

BLOCK_SIZE = 16
PIECE = 3072
"""Largest number of blocks in a frame, as in an engine."""
TOKENS_PER_STEP = 6
NAMES = ("support", "search", "review", "translate", "agent", "nightly", "tests", "summary")


@dataclass
class Block:
    """One block of the made-up cache."""

    state: int = FREE
    refs: int = 0
    filled: int = 0
    depth: int = 0
    hits: int = 0
    hash: int = 0
    parent: int = 0
    owners: list[int] = field(default_factory=list)


@dataclass
class Request:
    """A request with the blocks of its prompt's shared part and its own."""

    order: int
    family: int
    trunk: list[int]
    own: list[int]
    num_tokens: int
    """Tokens in its own blocks."""
    max_tokens: int


class SyntheticCache:
    """`num_running` requests at a time, which together use about six tenths of the blocks."""

    def __init__(self, num_blocks: int, num_running: int, *, num_families: int = 6, num_waiting: int = 5) -> None:
        self.random = random.Random(num_blocks)
        self.blocks = [Block() for _ in range(num_blocks)]
        self.free = deque(range(num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()
        self.changed: set[int] = set()
        self.requests: dict[int, Request] = {}
        self.events: list[CacheEvent] = []
        self.num_waiting = num_waiting
        self.num_started = self.time_s = 0.0
        self.generated = self.prompt = self.hit = self.evicted = 0
        self.length = max(4, int(num_blocks * 0.6 / num_running))
        """Blocks of a request's own part, on average."""
        self.gone: list[int] = []
        self.trunks = [self._trunk(family) for family in range(num_families)]
        while len(self.free) > num_blocks * 0.12:
            self._start(self.length)
            if len(self.requests) > num_running:
                self._finish(next(iter(self.requests)))
        self.num_running = num_running

    def step(self, seconds: float = 1 / 30) -> None:
        """Let every request generate some tokens, which takes so long; finish and start some."""
        self.time_s += seconds
        for request in list(self.requests.values()):
            self._write(request, TOKENS_PER_STEP)
            if request.num_tokens >= request.max_tokens:
                self._finish(request.order)
        if len(self.requests) < self.num_running:
            self._start(self.length // 2)

    def frame(self, number: int, ids: Sequence[int] | None = None) -> bytes:
        """The changes since the last frame, or these blocks, as an engine would send them."""
        ids = sorted(self.changed) if ids is None else ids
        self.changed.difference_update(ids)
        blocks = [self.blocks[i] for i in ids]
        columns = BlockColumns(
            list(ids), [b.state for b in blocks], [b.refs for b in blocks], [b.filled for b in blocks],
            [b.depth for b in blocks], [b.hits for b in blocks], [b.hash for b in blocks], [b.parent for b in blocks],
            [b.owners for b in blocks],
        )  # fmt: skip
        setup = CacheSetup(BLOCK_SIZE, len(self.blocks), 0, 1, 256) if number == 0 else None
        events, self.events = self.events, []
        gone, self.gone = self.gone, []
        update = CacheUpdate(
            number, self.time_s, setup, columns, None, self._rows(), gone, self._counters(), events[-64:]
        )
        return msgspec.json.encode(update)

    def _trunk(self, family: int) -> list[int]:
        length = min(max(3, self.length // 3), 120)
        ids = [self._take(family, depth, parent=0) for depth in range(length)]
        for depth, block_id in enumerate(ids):
            self._fill(
                block_id, parent=self.blocks[ids[depth - 1]].hash if depth else family + 1, num_tokens=BLOCK_SIZE
            )
            self.blocks[block_id].state = PINNED if family == 0 else CACHED
            self.blocks[block_id].refs = int(family == 0)
        return ids

    def _take(self, order: int, depth: int, parent: int) -> int:
        """A block without content: a free one, or else the cached one that was not used for longest."""
        if self.free:
            block_id = self.free.popleft()
        else:
            block_id = self.cached.popitem(last=False)[0]
            self.evicted += BLOCK_SIZE
            self.events.append(CacheEvent("evicted", block_ids=[block_id]))
        self.blocks[block_id] = Block(OWNED, 1, 0, depth, 0, 0, parent, [order])
        self.changed.add(block_id)
        return block_id

    def _fill(self, block_id: int, parent: int, num_tokens: int) -> None:
        block = self.blocks[block_id]
        block.filled, block.parent = num_tokens, parent
        if num_tokens == BLOCK_SIZE:
            block.hash = self.random.getrandbits(47) + 1
        self.changed.add(block_id)

    def _start(self, num_blocks: int) -> None:
        order = int(self.num_started)
        self.num_started += 1
        family = min(int(self.random.expovariate(0.5)), len(self.trunks) - 1)
        trunk = self.trunks[family]
        for block_id in trunk:
            block = self.blocks[block_id]
            block.state, block.refs, block.hits = max(block.state, OWNED), block.refs + 1, block.hits + 1
            block.owners = [*block.owners, order] if block.refs > 1 and block.hits > 1 else [order]
            self.changed.add(block_id)
        length = max(2, int(num_blocks * self.random.uniform(0.3, 1.5)))
        request = Request(order, family, trunk, [], 0, (length + self.random.randint(2, 6 + length)) * BLOCK_SIZE)
        self.requests[order] = request
        self._write(request, length * BLOCK_SIZE - self.random.randint(0, 15))
        self.hit += len(trunk) * BLOCK_SIZE
        self.prompt += (len(trunk) + length) * BLOCK_SIZE
        self.events.append(CacheEvent("started", request_id=self._name(request)))

    def _write(self, request: Request, num_tokens: int) -> None:
        for _ in range(-(-num_tokens // BLOCK_SIZE) + 1):
            here = min(num_tokens, BLOCK_SIZE - request.num_tokens % BLOCK_SIZE)
            if not here:
                break
            parents = request.own or request.trunk
            if request.num_tokens % BLOCK_SIZE == 0:
                depth = len(request.trunk) + len(request.own)
                request.own.append(self._take(request.order, depth, self.blocks[parents[-1]].hash))
            last = request.own[-1]
            request.num_tokens += here
            filled = (request.num_tokens - 1) % BLOCK_SIZE + 1
            self._fill(last, self.blocks[last].parent, filled)
            num_tokens -= here
            self.generated += here

    def _finish(self, order: int) -> None:
        request = self.requests.pop(order)
        self.gone.append(order)
        for block_id in request.trunk:
            block = self.blocks[block_id]
            block.refs -= 1
            block.owners = [owner for owner in block.owners if owner != order]
            if block.refs == 0:
                block.state = CACHED
            self.changed.add(block_id)
        for block_id in request.own:
            block = self.blocks[block_id]
            block.state, block.refs, block.owners = CACHED, 0, []
            self.cached[block_id] = None
            self.changed.add(block_id)
        self.events.append(CacheEvent("finished", 1, self._name(request), "stop", [], 0.01, 0.2, 0.03, 4.0))

    def _name(self, request: Request) -> str:
        return f"cmpl-{NAMES[request.family]}-{request.order}-0-{request.order:08x}"

    def _rows(self) -> list[RequestRow]:
        rows = [
            RequestRow(
                r.order, self._name(r), "running", "decode", "", 0, 1, (len(r.trunk) + len(r.own) // 2) * BLOCK_SIZE,
                len(r.trunk) * BLOCK_SIZE, len(r.trunk) * BLOCK_SIZE + r.num_tokens, r.num_tokens // 2, r.max_tokens,
                len(r.trunk) + len(r.own), 0,
            )
            for r in self.requests.values()
        ]  # fmt: skip
        return rows + [
            RequestRow(
                10**6 + i, f"cmpl-nightly-{i}-0-{i:08x}", "waiting", "prefill", "", 0, 1, 400, 0, 0, 0, 200, 0, 0
            )
            for i in range(self.num_waiting)
        ]

    def _counters(self) -> dict[str, int]:
        used = sum(len(r.own) for r in self.requests.values()) + sum(map(len, self.trunks))
        return {
            "running": len(self.requests), "waiting": self.num_waiting, "swapped": 0, "used_blocks": used,
            "pinned_blocks": len(self.trunks[0]), "steps": int(self.time_s * 30), "prompt_tokens": self.prompt,
            "generated_tokens": self.generated, "preemptions": 0, "preemptions_by_swap": 0, "swapped_blocks": 0,
            "prefix_queried": self.prompt, "prefix_hit": self.hit, "prefix_evicted": self.evicted,
        }  # fmt: skip


class SyntheticLLM:
    """The part of AsyncLLM that the page's endpoints use."""

    death = None

    def __init__(self, cache: SyntheticCache, frames_per_s: float) -> None:
        self.cache = cache
        self.frames_per_s = frames_per_s
        """0: nothing changes after the snapshot."""
        self.tokenizer = SimpleNamespace(chat_templates={}, decode_token=lambda token: f" word{token % 97}")
        model: Any = SimpleNamespace(model="synthetic", max_model_len=4096, vocab_size=1000)
        self.model_config = model
        self.adapters = AdapterTable(model, None)
        self.group = SimpleNamespace(engines=[self], running=[True])

    async def watch_cache(self, engine: int = 0) -> AsyncGenerator[bytes, None]:
        """The snapshot in pieces, then changes."""
        ids = [i for i, block in enumerate(self.cache.blocks) if block.state != FREE]
        for number, start in enumerate(range(0, max(1, len(ids)), PIECE)):
            yield self.cache.frame(number, ids[start : start + PIECE])
            await asyncio.sleep(0.001)
        number += 1
        while self.frames_per_s:
            await asyncio.sleep(1 / self.frames_per_s)
            self.cache.step(1 / self.frames_per_s)
            yield self.cache.frame(number)
            number += 1
        await asyncio.Event().wait()

    async def block_tokens(self, tier: int, block_ids: Sequence[int], engine: int = 0) -> list[list[int]]:
        """Made-up tokens."""
        blocks = [self.cache.blocks[i] for i in block_ids]
        return [[block_id * 7 + i for i in range(b.filled)] for block_id, b in zip(block_ids, blocks, strict=True)]


@contextmanager
def page_server(cache: SyntheticCache, frames_per_s: float = 30) -> Iterator[str]:
    """Serve the page over this cache until the block ends; yields the address."""
    llm: Any = SyntheticLLM(cache, frames_per_s)
    args = ServerArgs()
    state = ServerState(models=ModelPool.of(llm, ("synthetic",), args), args=args)
    state.shows_tokens = lambda: True
    http = uvicorn.Server(uvicorn.Config(make_app(state), port=0, lifespan="off", log_config=None, ws="none"))
    thread = threading.Thread(target=lambda: asyncio.run(http.serve()))
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.01)
        yield f"http://127.0.0.1:{http.servers[0].sockets[0].getsockname()[1]}"
    finally:
        http.should_exit = http.force_exit = True
        thread.join()

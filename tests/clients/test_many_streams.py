"""A thousand streams at once: each complete or refused, none changed by the others, nothing left of them."""

import asyncio
import contextlib
import json
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.served import MODEL, Served, quire_serve

NUM_STREAMS = 1000
MAX_WAITING = 700
PROMPTS = ["import os\n", "def read(", "class Queue:\n", "for i in range(", "return self.", '"""Return the', "x = ["]
MAX_GROWTH_BYTES = 24 * 2**20
"""what allocators may keep; a request's leftovers of 64 KiB in each of the second thousand would exceed it"""
VANISHED = (200, "")


@pytest.fixture(scope="module")
def wide_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with room for most of the streams, and a test process that may open as many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    try:
        with quire_serve(tmp_path_factory.mktemp("wide"), "--max-waiting", str(MAX_WAITING)) as served:
            yield served
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def stream(served: Served, prompt: str, vanish: bool = False) -> tuple[int, str]:
    """One request's status and text; VANISHED for one whose client leaves after the first event."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 10, "temperature": 0, "stream": True}
    if vanish:
        body |= {"max_tokens": 500, "ignore_eos": True}
    raw = json.dumps(body).encode()
    host, port = served.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        headers = f"authorization: {served.headers['authorization']}\r\ncontent-length: {len(raw)}\r\n"
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n{headers}\r\n".encode() + raw
        )
        if vanish:
            head = await reader.readuntil(b"\r\n\r\n")
            if b" 200 " in head:
                await reader.readuntil(b"\n\n")
                return VANISHED
            return int(head.split()[1]), ""
        head, _, rest = (await reader.read()).partition(b"\r\n\r\n")
        status = int(head.split()[1])
        if status != 200:
            return status, ""
        data = [line.removeprefix("data: ") for line in rest.decode().splitlines() if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return status, "".join(json.loads(item)["choices"][0]["text"] for item in data[:-1])
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def thousand(served: Served) -> list[tuple[int, str]]:
    """Each eighth client vanishes."""
    return await asyncio.gather(
        *(stream(served, PROMPTS[i % len(PROMPTS)], vanish=i % 8 == 7) for i in range(NUM_STREAMS))
    )


def memory_bytes(served: Served) -> int:
    """Of the server's process and the engine's."""
    pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in served.pids)
    return pages * resource.getpagesize()


def test_a_thousand_streams(wide_served: Served) -> None:
    served = wide_served
    alone = [asyncio.run(stream(served, prompt)) for prompt in PROMPTS]
    assert all(text for _, text in alone)
    grown = []
    for _ in range(3):
        before = memory_bytes(served)
        answers = asyncio.run(thousand(served))
        served.wait_until_idle()
        grown.append(memory_bytes(served) - before)
        statuses = Counter(status for status, _ in answers)
        assert set(statuses) <= {200, 429}
        assert statuses[200] >= MAX_WAITING
        for i, answer in enumerate(answers):
            if answer[0] == 200:
                assert answer == (VANISHED if i % 8 == 7 else alone[i % len(PROMPTS)])
    assert served.metric("vllm:kv_cache_usage_perc") == 0
    assert min(grown[1:]) < MAX_GROWTH_BYTES, f"grew by {grown} bytes"

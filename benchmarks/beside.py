"""The figure `beside`: the gaps of a stream while clients embed on the same cores, with another model of the server."""

import json
import statistics
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event

from benchmarks.checkpoints.dense import ensure_checkpoint
from benchmarks.drivers.embeddings import served
from benchmarks.embeddings import model_folder, texts_of
from benchmarks.engines.interleaved import Row, Run

_NUM_CLIENTS, _NUM_TOKENS, _TEXTS_AT_ONCE = 64, 48, 8


def beside(run: Run) -> Iterator[Row]:
    """Measure the gaps of a stream alone and beside 64 clients that embed, interleaved."""
    folder = model_folder()
    texts, _, _ = texts_of(folder)
    config = run.folder / "beside.yaml"
    generator = {
        "model": str(ensure_checkpoint(run.checkpoint)),
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "speculative_config": {"method": "off"},  # the stream repeats itself: with drafts a gap would be many tokens'
    }
    embedder = {"model": str(folder), "dtype": "bfloat16"}
    config.write_text(json.dumps({"models": {"generator": generator, "embedder": embedder}, "preload_models": True}))
    server, url = served("--config", str(config))
    try:
        alone, loaded, tokens, rates = list[float](), list[float](), set[tuple[int, ...]](), list[float]()
        _stream(url)
        for _ in range(run.rounds):
            gaps, token_ids = _stream(url)
            alone += gaps
            tokens.add(token_ids)
            gaps, token_ids, rate = _loaded(url, texts)
            loaded += gaps
            tokens.add(token_ids)
            rates.append(rate)
        row: Row = {"num_clients": _NUM_CLIENTS, "num_gaps": len(alone), "same_tokens": len(tokens) == 1}
        for name, find in (("median", statistics.median), ("p95", lambda gaps: statistics.quantiles(gaps, n=20)[-1])):
            row |= {f"{name}_ms": [round(find(gaps) * 1e3, 2) for gaps in (alone, loaded)]}
            row |= {f"{name}_ratio": round(find(loaded) / find(alone), 3)}
        yield row | {"texts_per_s": round(statistics.median(rates), 1)}
    finally:
        server.terminate()
        server.wait(60)


def _loaded(url: str, texts: list[str]) -> tuple[list[float], tuple[int, ...], float]:
    """The gaps, the tokens, and the texts per second of the clients meanwhile."""
    is_over = Event()

    def embed_on(client: int) -> int:
        count = 0
        while not is_over.is_set():
            first = (client * 7 + count) % (len(texts) - _TEXTS_AT_ONCE)
            _post(f"{url}/v1/embeddings", model="embedder", input=texts[first : first + _TEXTS_AT_ONCE])
            count += _TEXTS_AT_ONCE
        return count

    with ThreadPoolExecutor(_NUM_CLIENTS) as pool:
        start = time.perf_counter()
        clients = [pool.submit(embed_on, client) for client in range(_NUM_CLIENTS)]
        time.sleep(1)
        try:
            gaps, token_ids = _stream(url)
        finally:
            is_over.set()
        num_texts = sum(client.result() for client in clients)
    return gaps, token_ids, num_texts / (time.perf_counter() - start)


def _stream(url: str) -> tuple[list[float], tuple[int, ...]]:
    body = {
        "model": "generator",
        "prompt": list(range(100, 164)),
        "max_tokens": _NUM_TOKENS,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    body |= {"temperature": 0, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times, token_ids = list[float](), list[int]()
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                times.append(time.perf_counter())
                token_ids += json.loads(line[6:])["choices"][0].get("token_ids") or ()
    return [b - a for a, b in pairwise(times)], tuple(token_ids)


def _post(url: str, **body: object) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        found: bytes = response.read()
    return found

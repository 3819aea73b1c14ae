"""Measure the overhead of serving: tokens per second of HTTP streams and of the engine alone, and CPU time per token.

    python tools/bench_serving.py [MODEL] [--streams 64] [--input-len 64] [--output-len 128] [--runs 3]

Three interfaces of the engine run the same greedy requests, all sent at once: `LLM` in this process, AsyncLLM with its
engine process, and `quire serve` with a minimal client in this process. Their runs are interleaved, so that other load
of the machine affects all of them, and the best run of each counts. Prints one line of JSON per interface (field
`door`): `slowdown` is the loss against LLM's throughput, `server_us_per_token` the CPU time of the API process, and
`client_us_per_token` that of this process, which a client on another machine would not take from the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import uvloop

from quire import LLM, EngineArgs
from quire.cli.bench.throughput import greedy, random_prompts, run_once
from quire.interfaces.async_llm.async_llm import AsyncLLM

READY_S = 120
_TAIL_BYTES = 4096
_WARM_UP_LEN = 4
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass
class Run:
    """The times of one batch of streams through one interface."""

    elapsed_s: float
    server_cpu_s: float | None = None
    client_cpu_s: float | None = None


def cpu_s(pid: int) -> float:
    """Return the CPU time that a process has used, with its threads but without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


class _Stream(asyncio.Protocol):
    """Sends a request, waits for the end of its stream, and keeps its last bytes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tail = b""

    def connection_made(self, transport: Any) -> None:
        """Send the request."""
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Keep the last bytes."""
        self.tail = (self.tail + data)[-_TAIL_BYTES:]

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end of the stream."""
        if not self.ended.done():
            self.ended.set_result(None)


async def stream_all(port: int, prompts: list[list[int]], output_len: int) -> None:
    """Stream a completion of each prompt, all at once. Raises RuntimeError if one is incomplete."""

    async def stream(prompt: list[int]) -> None:
        fields = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
        body = json.dumps(fields | {"stream": True, "stream_options": {"include_usage": True}})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}"
        made = _Stream(f"{head}\r\n\r\n{body}".encode())
        await asyncio.get_running_loop().create_connection(lambda: made, "127.0.0.1", port)
        await made.ended
        found = re.search(rb'"completion_tokens":(\d+)', made.tail)
        if found is None or int(found[1]) != output_len or b"data: [DONE]" not in made.tail:
            raise RuntimeError(f"a stream ended with {made.tail[-300:]!r}")

    await asyncio.gather(*map(stream, prompts))


class Served:
    """`quire serve` as a process."""

    def __init__(self, args: argparse.Namespace, log: Path) -> None:
        flags = [_flag(name, value) for name, value in engine_kwargs(args).items() if value is not None]
        command = [sys.executable, "-m", "quire", "serve", "--port=0", "--no-log-requests", *flags]
        with log.open("wb") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        deadline = time.monotonic() + READY_S
        while not (found := re.search(r"serves .* at http://[\d.]+:(\d+)", log.read_text())):
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.1)
        self._port = int(found[1])

    async def run(self, prompts: list[list[int]], output_len: int) -> Run:
        """Run one batch."""
        pids = self.process.pid, os.getpid()
        start_s, before = time.perf_counter(), [cpu_s(pid) for pid in pids]
        await stream_all(self._port, prompts, output_len)
        elapsed_s = time.perf_counter() - start_s
        return Run(elapsed_s, *(cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)))

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait()


async def run_async_llm(llm: AsyncLLM, prompts: list[list[int]], output_len: int) -> Run:
    """Run one batch, token by token. This process does the work of a server's API process."""
    params = msgspec.structs.replace(greedy(output_len), output_kind="delta")

    async def read(i: int, token_ids: list[int]) -> None:
        async for output in llm.generate({"prompt_token_ids": token_ids}, params, request_id=str(i)):
            del output

    start_s, before = time.perf_counter(), cpu_s(os.getpid())
    await asyncio.gather(*(read(i, token_ids) for i, token_ids in enumerate(prompts)))
    return Run(time.perf_counter() - start_s, cpu_s(os.getpid()) - before)


def engine_kwargs(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the engine, which are the same for all interfaces."""
    return {
        "model": args.model,
        "max_num_seqs": args.streams,
        "max_model_len": args.input_len + args.output_len + 1,
        "enable_prefix_caching": False,
        "kv_cache_memory": args.kv_cache_memory,
    }


async def measure(args: argparse.Namespace, log: Path) -> dict[str, list[Run]]:
    """Return the runs of each interface, after a short run to warm up."""
    engine_args = EngineArgs(**engine_kwargs(args))
    llm = LLM(**engine_kwargs(args))
    prompts = random_prompts(args.streams, args.input_len, llm.engine.model_config.vocab_size)
    served, async_llm = Served(args, log), await AsyncLLM.from_args(engine_args)

    async def run_llm(output_len: int) -> Run:
        return Run(run_once(llm, prompts, greedy(output_len)))

    interfaces: dict[str, Callable[[int], Awaitable[Run]]] = {
        "LLM": run_llm,
        "AsyncLLM": lambda output_len: run_async_llm(async_llm, prompts, output_len),
        "quire serve": lambda output_len: served.run(prompts, output_len),
    }
    try:
        for run in interfaces.values():
            await run(_WARM_UP_LEN)
        runs: dict[str, list[Run]] = {name: [] for name in interfaces}
        for _ in range(args.runs):
            for name, run in interfaces.items():
                runs[name].append(await run(args.output_len))
        return runs
    finally:
        await async_llm.shutdown()
        served.close()


def report(args: argparse.Namespace, runs: dict[str, list[Run]]) -> None:
    """Print a line for each interface."""
    num_tokens = args.streams * args.output_len
    best = {name: min(made, key=lambda run: run.elapsed_s) for name, made in runs.items()}
    for name, run in best.items():
        row = {
            "door": name,
            "model": Path(args.model or "quire-tiny").name,
            "streams": args.streams,
            "input_len": args.input_len,
            "output_len": args.output_len,
            "tokens_per_s": round(num_tokens / run.elapsed_s, 1),
            "slowdown": round(1 - best["LLM"].elapsed_s / run.elapsed_s, 4),
            "server_us_per_token": _us_per_token(run.server_cpu_s, num_tokens),
            "client_us_per_token": _us_per_token(run.client_cpu_s, num_tokens),
            "all_tokens_per_s": [round(num_tokens / each.elapsed_s, 1) for each in runs[name]],
        }
        print(json.dumps(row), flush=True)


def _us_per_token(seconds: float | None, num_tokens: int) -> float | None:
    return None if seconds is None else round(seconds * 1e6 / num_tokens, 2)


def _flag(name: str, value: Any) -> str:
    name = name.replace("_", "-")
    return f"--{name}={value}" if not isinstance(value, bool) else f"--{name}" if value else f"--no-{name}"


def main() -> None:
    """Measure and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--kv-cache-memory", default="512MiB")
    args = parser.parse_args()
    with TemporaryDirectory() as folder:
        report(args, uvloop.run(measure(args, Path(folder) / "serve.log")))


if __name__ == "__main__":
    main()

"""Serve mixed clients for a long time, and check that no resources leak.

    python -m reliability.soak [--minutes 30] [--seed 1] [--clients 24] [--kill-every-s 60]
                               [--fault-probability 0.0001] [--record]

Clients send streams, whole responses, samples, beams, grammars, log-probabilities, stored responses, three protocols
and invalid requests over HTTP to `quire serve`, which runs the embedded checkpoint with a cache so small that requests
are preempted. Three in ten requests are abandoned by their client, the engine process is killed regularly, and faults
are injected at random into steps and into the work for single requests; no other request may end because of them. At
the end, the number of used blocks, open files and threads must be the same as after a warm-up, and memory may have
grown by at most 50 MB. A greedy stream, requested throughout, must never change a token. Prints one line of JSON; the
exit status is 1 if anything leaked or was wrong. With `--plant-leak` the server leaks on purpose, and the exit status
must be 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import uvloop

from quire.common.faults import Fault
from quire.common.faults import environment as fault_environment
from reliability.injections import COMMON, OWN
from reliability.page import record, table
from reliability.served import Exchange, Resources, Served, post

MAX_GROWTH_BYTES = 50 * 10**6
FLAGS = [
    "--kv-cache-memory=16MiB", "--max-num-seqs=16", "--max-model-len=1024", "--swap-space=0.008", "--max-waiting=256",
    "--no-log-requests", "--response-store-max=200",
]  # fmt: skip
_LEAVING = 0.45
"""Share of requests that their client means to abandon; about a third of these are answered first."""
_INJECTED = "BufferError"
"""The type of injected errors, which nothing else raises: a request that the log names with it failed by injection."""
_REQUEST_LIMIT_S = 120.0
_PASSES_TO_START = 100
"""Outputs of kernels that get their memory before faults begin: an engine needs 50 to start, without which no server
can serve."""
_SHARED = "All of these requests begin with the same words, whose blocks they share. " * 3
_PLACES = ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"]
_WRONG: list[tuple[str, object]] = [
    ("/v1/completions", {"prompt": "x", "max_tokens": -1}),
    ("/v1/completions", {"prompt": "x", "n": 10**9}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x " * 5000}]}),
    ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}),
    ("/v1/nothing", {}),
]
_SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["ok", "n"],
}
_LEAKS = {
    "memory": "quire.interfaces.async_llm.request_table:RequestTable._end",
    "files": "quire.interfaces.async_llm.request_table:RequestTable._end",
    "threads": "quire.interfaces.async_llm.request_table:RequestTable._end",
    "blocks": "quire.kv.block_space_manager:BlockSpaceManager.free",
}
_PLANT = """
import builtins, importlib, sys, threading
kind, module, cls, name = {kind!r}, {module!r}, {cls!r}, {name!r}
kept = []
real = builtins.__import__
def plant(found):
    owner = getattr(found, cls)
    method = getattr(owner, name)
    def leaking(self, *args, **kwargs):
        kept.append(None)
        if kind == "memory":
            kept.append(bytearray(200_000))
        elif kind == "files" and len(kept) % 5 == 0:
            kept.append(open("/dev/null"))
        elif kind == "threads" and len(kept) % 10 == 0:
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        elif kind == "blocks" and len(kept) % 20 == 0:
            return None
        return method(self, *args, **kwargs)
    setattr(owner, name, leaking)
def importing(what, *args, **kwargs):
    made = real(what, *args, **kwargs)
    found = sys.modules.get(module)
    if found is not None and hasattr(found, cls) and not kept:
        kept.append(None)
        plant(found)
    return made
builtins.__import__ = importing
"""
"""A sitecustomize module that wraps a method when its module is imported, in every process."""


@dataclass
class Tally:
    """The outcomes of requests."""

    done: Counter[str] = field(default_factory=Counter)
    """Number of requests by kind and outcome."""
    wrong: list[str] = field(default_factory=list)
    """Violations: outcomes that must not happen."""
    num_kills: int = 0
    failed: list[str] = field(default_factory=list)
    """Ids of requests that ended with an internal error."""

    def add(self, kind: str, exchange: Exchange, left: bool) -> None:
        """Count one exchange. While no engine runs, 503 is valid and a stream may end with an error."""
        outcome = "left" if left else str(exchange.status) if exchange.ended else "cut off"
        if found := re.search(rb"internal error; see the server.s log for request id (\w+)", exchange.body):
            self.failed.append(found[1].decode())
            outcome += " internal error"
        self.done[f"{kind} {outcome}"] += 1
        is_expected = exchange.status in ((400, 404, 413, 429, 503) if kind == "wrong" else (0, 200, 429, 503))
        if not found and not is_expected:
            self.wrong.append(f"{kind}: {exchange.status} {bytes(exchange.body[:200])!r}")
        if not left and not exchange.ended:
            self.wrong.append(f"{kind}: incomplete, {exchange.status} {bytes(exchange.body[-200:])!r}")


def requests(rng: random.Random) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield (kind, path, body) of requests without end."""
    while True:
        kind = rng.choices(
            ["stream", "chat", "whole", "beams", "grammar", "logprobs", "responses", "messages", "tokenize", "wrong"],
            [25, 15, 12, 6, 12, 6, 6, 6, 6, 6],
        )[0]
        text = _SHARED * rng.randint(0, 2) + f"{rng.randrange(1000)} " + "word " * rng.randrange(60)
        fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 150), "user": rng.choice("abc")}
        messages = [{"role": "user", "content": text}]
        sampled = {"temperature": rng.choice([0, 0.8]), "seed": rng.randrange(100)}
        match kind:
            case "stream":
                yield kind, _PLACES[0], fields | sampled | {"prompt": text, "stream": True, "ignore_eos": True}
            case "chat":
                yield kind, _PLACES[1], fields | sampled | {"messages": messages, "stream": True}
            case "whole":
                yield kind, _PLACES[0], fields | {"prompt": [text, text + "more"], "n": rng.randint(1, 3)}
            case "beams":
                yield kind, _PLACES[0], fields | {"prompt": text, "use_beam_search": True, "n": rng.randint(2, 4)}
            case "grammar":
                form: dict[str, Any] = rng.choice(
                    [{"guided_regex": r"[a-f]{5,40}"}, {"guided_json": _SCHEMA}, {"guided_choice": ["a", "b"]}]
                )
                yield kind, _PLACES[1], fields | form | {"messages": messages, "stream": rng.random() < 0.5}
            case "logprobs":
                yield kind, _PLACES[0], fields | {"prompt": text, "logprobs": 5, "echo": True}
            case "responses":
                asked = {"input": text, "max_output_tokens": fields["max_tokens"], "background": rng.random() < 0.3}
                yield kind, _PLACES[2], asked
            case "messages":
                yield kind, _PLACES[3], {"messages": messages, "max_tokens": fields["max_tokens"], "stream": True}
            case "tokenize":
                yield kind, "/tokenize", {"prompt": text}
            case "wrong":
                yield kind, *rng.choice(_WRONG)  # type: ignore[misc]


async def client(port: int, rng: random.Random, until_s: float, tally: Tally) -> None:
    """Send one request after another, as one client, and abandon some of them."""
    for kind, path, body in requests(rng):
        if time.monotonic() > until_s:
            return
        leaves, is_stream = rng.random() < _LEAVING, bool(body.get("stream"))
        leave_after = rng.randint(1, 10) if leaves and is_stream else None
        limit_s = rng.uniform(0, 0.5) if leaves and not is_stream else _REQUEST_LIMIT_S
        try:
            async with asyncio.timeout(limit_s):
                exchange = await post(port, path, json.dumps(body).encode(), leave_after=leave_after)
        except TimeoutError:
            if leaves and not is_stream:
                tally.done[f"{kind} left"] += 1
            else:
                tally.wrong.append(f"{kind}: no answer within {limit_s:g} s")
            continue
        tally.add(kind, exchange, leaves and not exchange.ended)
        if exchange.status in (429, 503):
            await asyncio.sleep(rng.uniform(0.2, 1))


async def canary(port: int, until_s: float, tally: Tally) -> None:
    """Request the same greedy stream again and again, and check that its text never changes."""
    asked = {"prompt": "def dumps(obj):", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
    known: str | None = None
    while time.monotonic() < until_s:
        exchange = await post(port, _PLACES[0], json.dumps(asked).encode())
        choices = [event["choices"][0] for event in exchange.events if event.get("choices")]
        is_whole = exchange.ended and bool(choices) and choices[-1]["finish_reason"] == "length"
        tally.done[f"canary {'whole' if is_whole else exchange.status}"] += 1
        if is_whole:
            text = "".join(choice["text"] for choice in choices)
            known = text if known is None else known
            if text != known:
                tally.wrong.append(f"the canary's text changed: {text!r}")
        else:
            await asyncio.sleep(0.2)


async def killer(served: Served, every_s: float, until_s: float, tally: Tally) -> None:
    """Kill the engine process at intervals, but not shortly before the end."""
    while every_s and time.monotonic() + 2 * every_s < until_s:
        await asyncio.sleep(every_s)
        if (pid := served.engine_pid) is not None:
            os.kill(pid, signal.SIGKILL)
            tally.num_kills += 1


async def load(served: Served, seconds: float, options: argparse.Namespace, tally: Tally, seed: int) -> None:
    """Run all clients for a time."""
    until_s = time.monotonic() + seconds
    clients = [client(served.port, random.Random(f"{seed}-{i}"), until_s, tally) for i in range(options.clients)]
    await asyncio.gather(
        *clients, canary(served.port, until_s, tally), killer(served, options.kill_every_s, until_s, tally)
    )


async def first_grammars(port: int, tally: Tally) -> None:
    """Compile grammars side by side, so that all processes that try them have started, however short the warm-up."""

    async def ask(length: int) -> None:
        body = {"prompt": "a", "max_tokens": 2, "guided_regex": f"[g-z]{{{length}}}"}
        tally.add("grammar", await post(port, _PLACES[0], json.dumps(body).encode()), left=False)

    await asyncio.gather(*map(ask, range(1, 7)))


def holdings(served: Served, settle_s: float) -> dict[str, Resources]:
    """Return the resources of both processes when they are idle. Raises RuntimeError if they do not become idle."""
    if not served.wait_until_idle(settle_s):
        used = served.metric("vllm:kv_cache_usage_perc")
        raise RuntimeError(f"not idle after {settle_s:g} s: {used:.1%} of the blocks are in use")
    engine_pid = served.engine_pid
    if engine_pid is None:
        raise RuntimeError("no engine process is running")
    time.sleep(1)  # connections close and threads end
    return {"API": Resources.of(served.pid), "engine": Resources.of(engine_pid)}


def left_behind(before: dict[str, Resources], after: dict[str, Resources]) -> Iterator[str]:
    """Yield a description of each leak."""
    for name in before:
        growth = after[name].memory_bytes - before[name].memory_bytes
        if growth > MAX_GROWTH_BYTES:
            yield f"the {name} process uses {growth / 1e6:.0f} MB more"
        for what in ("num_threads", "num_files"):
            more = getattr(after[name], what) - getattr(before[name], what)
            if more > 2:
                yield f"the {name} process has {more} {what[4:]} more"


def plant(kind: str, folder: Path) -> dict[str, str]:
    """Return the environment of a server that leaks."""
    module, _, method = _LEAKS[kind].partition(":")
    cls, _, name = method.partition(".")
    (folder / "sitecustomize.py").write_text(_PLANT.format(kind=kind, module=module, cls=cls, name=name))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, sys.path)])}


def not_injected(logged: str, failed: list[str]) -> Iterator[str]:
    """Yield the requests that failed without an injected fault, with their lines of the log."""
    entries = re.split(r"^(?=\d{4}-)", logged, flags=re.MULTILINE)
    injected = "".join(entry for entry in entries if _INJECTED in entry)
    for request_id in failed:
        if request_id not in injected:
            logs = "".join(entry for entry in entries if request_id in entry)
            yield f"request {request_id} failed without an injected fault: {logs[-3000:]}"


def soak(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the server and the clients, and return the result as one row."""
    environment = plant(options.plant_leak, folder) if options.plant_leak else {}
    faults = [
        Fault(
            point,
            error=_INJECTED,
            after=_PASSES_TO_START if point == "memory.workspace" else 0,
            times=None,
            probability=options.fault_probability,
        )
        for point in sorted((OWN | COMMON) - {"memory.native"})
    ]
    environment |= fault_environment(*faults)
    log, tally, began_s = folder / "serve.log", Tally(), time.monotonic()
    served = Served(FLAGS, log, environment)
    before: dict[str, Resources] = {}
    after: dict[str, Resources] = {}
    try:
        run: Callable[..., None] = uvloop.run
        seconds = options.minutes * 60
        warm_up_s = min(120.0, seconds / 3)
        run(first_grammars(served.port, tally))
        run(load(served, warm_up_s, options, tally, options.seed))
        before = holdings(served, options.settle_s)
        run(load(served, seconds - warm_up_s, options, tally, options.seed + 1))
        after = holdings(served, options.settle_s)
        tally.wrong += left_behind(before, after)
    except RuntimeError as error:
        tally.wrong.append(str(error))
    finally:
        status = served.close()
    logged = log.read_text()
    tally.wrong += not_injected(logged, tally.failed)
    if status != 0:
        tally.wrong.append(f"the server ended with status {status}")
    named = {name: vars_of(used) for name, used in (("before", before), ("after", after)) if used}
    return {
        "tool": "soak", "seed": options.seed, "minutes": round((time.monotonic() - began_s) / 60, 2),
        "clients": options.clients, "num_requests": sum(tally.done.values()), "num_engine_kills": tally.num_kills,
        "num_left": sum(number for kind, number in tally.done.items() if " left" in kind),
        "num_failed_steps": logged.count("a step failed"), "num_failed_requests": len(tally.failed),
        "done": dict(sorted(tally.done.items())), "held": named,
        "num_wrong": len(tally.wrong), "wrong": tally.wrong[:20],
    }  # fmt: skip


def vars_of(used: dict[str, Resources]) -> dict[str, dict[str, int]]:
    """Return the resources as plain dicts for JSON."""
    return {name: {field: getattr(each, field) for field in each.__dataclass_fields__} for name, each in used.items()}


def main() -> int:
    """Run the soak and print the result; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--kill-every-s", type=float, default=60, help="seconds between kills of the engine; 0: none")
    parser.add_argument("--fault-probability", type=float, default=1e-4, help="at each pass of a fault point")
    parser.add_argument("--settle-s", type=float, default=60, help="after which an idle server must hold nothing")
    parser.add_argument("--plant-leak", choices=_LEAKS, help="make the server leak on purpose")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        row = soak(options, Path(folder))
    print(json.dumps(row))
    if options.record:
        counts = [{"request and outcome": kind, "number": number} for kind, number in row["done"].items()]
        held = [{"process": name, "when": when} | each for when, by in row["held"].items() for name, each in by.items()]
        summary = (
            f"{row['num_requests']:,} requests of {row['clients']} clients in {row['minutes']} minutes, "
            f"{row['num_left'] / row['num_requests']:.0%} of them abandoned by their client. The engine was killed "
            f"{row['num_engine_kills']} times. {row['num_failed_steps']} steps failed and were repeated, and "
            f"{row['num_failed_requests']} requests ended by a fault in their own work. Violations: {row['num_wrong']}."
        )
        command = f"make soak ARGS='--minutes {options.minutes:g} --seed {options.seed}'"
        record("soak", command, [summary, "", *table(counts), "", *table(held)])
    return 1 if row["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill engines of a server with several under 32 streams, and check that every stream goes on as if nothing happened.

    python -m reliability.engine_kills [--count 100] [--seed 1] [--record]

Clients stream from `quire serve --data-parallel-size 2` with the embedded model. Again and again the engine that has
lived longest gets SIGKILL, once it has lived long enough for its successor to start without a longer delay. Then the
program checks that no stream ended with an error, that all texts are those of the same requests alone, that no stream
waited longer between two tokens than is allowed, and that all engines run in the end. Prints a line of JSON; the exit
status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from quire.interfaces.async_llm.supervisor import HEALTHY_S
from reliability.answers import Answer, ask
from reliability.page import record, table
from reliability.served import READY_S, Served

NUM_ENGINES = 2
NUM_CLIENTS = 32
PROMPTS = ("def fibonacci(n):", "Once upon a time", "import os\n", "class Stack:\n")
NUM_SEEDS = 8


def wish(prompt: str, seed: int) -> dict[str, Any]:
    """Return a request for a stream whose tokens its seed determines."""
    return {
        "prompt": prompt, "seed": seed, "temperature": 1.0, "max_tokens": 300, "ignore_eos": True, "stream": True,
    }  # fmt: skip


class EngineKills:
    """A server with several engines, its clients, and what they saw."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._rng = random.Random(options.seed)
        self._count, self._healthy_s = options.count, options.healthy_s
        self.log = folder / "serve.log"
        flags = [f"--data-parallel-size={NUM_ENGINES}", "--num-threads=1", "--no-log-requests", "--max-num-seqs=32"]
        self.server = Served([*flags, "--kv-cache-memory=64MiB"], self.log)
        self._began_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._still: list[tuple[float, float]] = []
        asked = [(prompt, seed) for prompt in PROMPTS for seed in range(NUM_SEEDS)]
        self.alone = {one: ask(self.server.port, wish(*one)) for one in asked}
        if any(answer.error for answer in self.alone.values()):
            raise RuntimeError(f"a stream failed without any kill: {self.alone}")
        self.answers: list[tuple[tuple[str, int], Answer]] = []

    def run(self) -> None:
        """Kill `count` engines under load."""
        with ThreadPoolExecutor(NUM_CLIENTS + 1) as pool:
            pool.submit(self._watch_clock)
            clients = [pool.submit(self._stream_on, self._rng.random()) for _ in range(NUM_CLIENTS)]
            try:
                for _ in range(self._count):
                    self._kill_oldest()
                self._wait_for_all()
            finally:
                self._is_over.set()
            for client in clients:
                self.answers += client.result()

    def _stream_on(self, seed: float) -> list[tuple[tuple[str, int], Answer]]:
        """Stream one request after another, as one client."""
        rng, answers = random.Random(seed), list[tuple[tuple[str, int], Answer]]()
        while not self._is_over.is_set():
            one = rng.choice([*self.alone])
            answers.append((one, ask(self.server.port, wish(*one))))
        return answers

    def _watch_clock(self) -> None:
        """Note when this program stands still, and the server perhaps with it: such times say nothing of a stream."""
        last_s = time.monotonic()
        while not self._is_over.wait(0.05):
            now_s = time.monotonic()
            if now_s - last_s > 0.5:
                self._still.append((last_s, now_s))
            last_s = now_s

    def _stood_still(self, answer: Answer) -> bool:
        start_s = answer.gap_end_s - answer.gap_s
        return any(begin < answer.gap_end_s and start_s < end for begin, end in self._still)

    def _kill_oldest(self) -> None:
        """Kill the engine that has lived longest, once all run and it has lived long enough."""
        pids = self._wait_for_all()
        victim = min(pids, key=lambda pid: self._began_s[pid])
        time.sleep(max(0.0, self._began_s[victim] + self._healthy_s - time.monotonic()) + self._rng.random())
        os.kill(victim, signal.SIGKILL)
        while _is_engine(victim):
            time.sleep(0.01)

    def _wait_for_all(self) -> list[int]:
        """Wait until all engines run and return their process ids."""
        deadline = time.monotonic() + READY_S
        while True:
            text = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text()
            pids = [pid for pid in map(int, text.split()) if _is_engine(pid)]
            is_ready = False
            with contextlib.suppress(OSError):
                is_ready = json.loads(self.server.get("/health")[1]).get("status") == "ok"
            if len(pids) == NUM_ENGINES and is_ready:
                for pid in pids:
                    self._began_s.setdefault(pid, time.monotonic())
                return pids
            if time.monotonic() > deadline:
                raise TimeoutError(f"{len(pids)} engines run after {READY_S:g} s")
            time.sleep(0.1)

    def row(self, limit_s: float) -> dict[str, Any]:
        """Return the result."""
        lost = [f"{one}: {answer.error} {answer.message}" for one, answer in self.answers if answer.error]
        changed = [str(one) for one, answer in self.answers if not answer.is_part_of(self.alone[one])]
        gaps = [answer for _, answer in self.answers if not self._stood_still(answer)]
        gap_s = max([answer.gap_s for answer in gaps], default=0.0)
        text = self.log.read_text(encoding="utf-8", errors="replace")
        moved = sum(map(int, re.findall(r"requests wait for another engine, (\d+) moved", text)))
        wrong = [*lost, *changed, *([f"a stream waited {gap_s:.2f} s"] if gap_s > limit_s else [])]
        return {
            "tool": "engine_kills", "kills": self._count, "streams": len(self.answers), "moved": moved,
            "not_timed": len(self.answers) - len(gaps), "lost": len(lost), "changed": len(changed),
            "longest_gap_s": round(gap_s, 2),
            "num_wrong": len(wrong), "wrong": wrong[:10],
        }  # fmt: skip


def _is_engine(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return b"engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def main() -> int:
    """Kill engines and print the result; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100, metavar="N", help="engines to kill")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--healthy-s", type=float, default=HEALTHY_S, help="age at which an engine may be killed")
    parser.add_argument("--gap-s", type=float, default=1.5, help="longest time between two tokens of a stream")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        kills = EngineKills(options, Path(folder))
        try:
            kills.run()
        finally:
            status = kills.server.close()
        row = kills.row(options.gap_s)
    row["num_wrong"] += status != 0
    print(json.dumps(row))
    if options.record:
        figures = [
            {name: row[name] for name in ("kills", "streams", "moved", "not_timed", "lost", "changed", "longest_gap_s")}
        ]
        record("engine_kills", f"python -m reliability.engine_kills --count {options.count}", table(figures))
    return 1 if row["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Kill and stop the processes of a server under load at random moments, and check that no request is lost.

    python -m reliability.kills [--count 200] [--seed 1] [--record]

In each round, clients send requests to `quire serve` with the embedded model (streams, whole responses, samples, beams,
grammars), and one of its processes (engine, grammar trial, API) gets SIGKILL or SIGSTOP, some engines twice. Then the
program checks that every client got a response, a clean error or, if its server was killed, a broken connection, in
bounded time; that all tokens are those of a server without failures; that no block is left in use; that no unexpected
process is left; and that the engine runs again within its loading time and a few seconds. Prints a line of JSON; the
exit status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import secrets
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from reliability.answers import Answer, ask
from reliability.page import record, table
from reliability.served import READY_S, Served

FLAGS = ["--kv-cache-memory=64MiB", "--max-num-seqs=32", "--no-log-requests"]
TRUTH_S = 10.0
"""Seconds within which /health must report that an engine is dead or hangs."""
NUM_CLIENTS = 8
PROMPTS = ("def fibonacci(n):", "Once upon a time", "import os\n", "class Stack:\n")
_HANG_TIMEOUT_S, _SLACK_S = 8.0, 5.0
"""Limits where no others are given, of a machine that does nothing else."""
_MARK = "QUIRE_CHAOS"
_TOKENS = {"max_tokens": 400, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "greedy stream": {"temperature": 0, "stream": True, **_TOKENS},
    "greedy whole": {"temperature": 0, **_TOKENS},
    "seeded stream": {"seed": 1, "logprobs": 2, "stream": True, **_TOKENS},
    "penalized whole": {"seed": 2, "frequency_penalty": 0.5, "min_tokens": 200, **_TOKENS},
    "samples stream": {"seed": 3, "n": 3, "stream": True, **_TOKENS},
    "best whole": {"seed": 4, "best_of": 3, **_TOKENS},
    "beams whole": {"use_beam_search": True, "n": 3, "temperature": 0, **_TOKENS, "max_tokens": 100},
    "grammar stream": {"seed": 5, "stream": True, "max_tokens": 400},
    "echoed whole": {"temperature": 0, "echo": True, "logprobs": 2, **_TOKENS},
    "unseeded stream": {"stream": True, **_TOKENS},
}
VICTIMS = ("engine", "trial", "api")
_WEIGHTS = (60, 25, 15)
_STOP_SHARE = 0.15
_TWICE_SHARE = 0.2
"""Share of killed engines whose successor is killed too, which ends the running requests."""


def wish(kind: str, prompt: str) -> dict[str, Any]:
    """Return a request. Equivalent grammars differ in their titles, so that each one has a trial of its own."""
    body = KINDS[kind] | {"prompt": prompt}
    if kind == "grammar stream":
        properties = {"name": {"type": "string", "maxLength": 1000}, "size": {"type": "integer"}}
        schema = {"type": "object", "properties": properties, "required": [*properties], "title": secrets.token_hex(8)}
        body["structured_outputs"] = {"json": schema}
    return body


class Server(Served):
    """`quire serve` and its descendant processes, which are found by a variable in their environment."""

    def __init__(self, log: Path, hang_timeout_s: float) -> None:
        self.mark = secrets.token_hex(8)
        self._log = log
        start_s = time.monotonic()
        super().__init__([*FLAGS, f"--hang-timeout-s={hang_timeout_s:g}"], log, {_MARK: self.mark})
        self.load_s = time.monotonic() - start_s

    def found(self, pattern: str, start: int = 0) -> list[float]:
        """Return the number in each match of a pattern in the log from offset `start`."""
        text = self._log.read_bytes()[start:].decode("utf-8", "replace")
        return [float(number) for number in re.findall(pattern, text)]

    @property
    def log_len(self) -> int:
        """Current length of the log."""
        return self._log.stat().st_size

    def answers(self, path: str, status: int) -> bool:
        """Return whether a GET of this path has this status."""
        try:
            return self.get(path)[0] == status
        except OSError:
            return False

    def pids(self) -> dict[str, list[int]]:
        """Return the ids of all its processes by kind."""
        found: dict[str, list[int]] = {kind: [] for kind in VICTIMS}
        for path in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if path.name.isdecimal() and f"{_MARK}={self.mark}".encode() in (path / "environ").read_bytes():
                    parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                    kind = "api" if int(path.name) == self.pid else "engine" if parent == self.pid else "trial"
                    found[kind].append(int(path.name))
        return found


def wait_for(what: str, limit_s: float, condition: Callable[[], bool]) -> float:
    """Wait for a condition and return the seconds it took. Raises TimeoutError."""
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > limit_s:
            raise TimeoutError(f"timed out after {limit_s:g} s waiting for {what}")
        time.sleep(0.02)
    return time.monotonic() - start_s


class Chaos:
    """The rounds of a run, and their results."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._rng = random.Random(args.seed)
        self._slack_s: float = args.slack_s
        self._hang_timeout_s: float = args.hang_timeout_s
        self._folder = folder
        self.num_kills = self.num_servers = 0
        self.counts: Counter[str] = Counter()
        self.recoveries_s: list[float] = []
        self.truths_s: list[float] = []
        self.longest_s = 0.0
        self.violations: list[str] = []
        self.server = self._start()
        self._references = self._undisturbed()

    def _start(self) -> Server:
        self.num_servers += 1
        return Server(self._folder / f"serve-{self.num_servers}.log", self._hang_timeout_s)

    def _undisturbed(self) -> dict[tuple[str, str], Answer]:
        asked = [(kind, prompt) for kind in KINDS for prompt in PROMPTS]
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers = pool.map(lambda one: ask(self.server.port, wish(*one)), asked)
            references = dict(zip(asked, answers, strict=True))
        for one, answer in references.items():
            if answer.error or not any(answer.texts.values()):
                raise RuntimeError(f"{one} failed without any kill: {answer}")
        return references

    def run(self, count: int) -> None:
        """Run rounds until `count` processes were killed, first one of each kind; stopped processes are not counted."""
        for place in itertools.takewhile(lambda _: self.num_kills < count, itertools.count()):
            victim = VICTIMS[place] if place < len(VICTIMS) else self._rng.choices(VICTIMS, _WEIGHTS)[0]
            is_stop = place >= len(VICTIMS) and self._rng.random() < _STOP_SHARE
            is_twice = victim == "engine" and not is_stop and place > 0 and self._rng.random() < _TWICE_SHARE
            seen = len(self.violations)
            self._round(victim, signal.SIGSTOP if is_stop else signal.SIGKILL, 2 if is_twice else 1)
            for violation in self.violations[seen:]:
                print(f"round {place}, {victim}{' stopped' if is_stop else ''}: {violation}", file=sys.stderr)

    def _round(self, victim: str, number: signal.Signals, times: int) -> None:
        is_over = threading.Event()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            seeds = [self._rng.random() for _ in range(NUM_CLIENTS)]
            clients = [pool.submit(self._ask_on, seed, self.server, is_over) for seed in seeds]
            try:
                for _ in range(times):
                    time.sleep(self._rng.uniform(0.1, 1.5))
                    self._disturb(victim, number)
            finally:
                is_over.set()
            answers = [answer for client in clients for answer in client.result()]
        for one, answer in answers:
            self._check(one, answer, victim, number)
        self._check_rest()

    @staticmethod
    def _ask_on(seed: float, server: Server, is_over: threading.Event) -> list[tuple[tuple[str, str], Answer]]:
        """Send one request after another, as one client, while its server runs."""
        rng, answers = random.Random(seed), list[tuple[tuple[str, str], Answer]]()
        while not is_over.is_set() and not (answers and answers[-1][1].error == "broken"):
            one = rng.choice([*KINDS]), rng.choice(PROMPTS)
            answers.append((one, ask(server.port, wish(*one))))
            if answers[-1][1].error:
                is_over.wait(0.3)
        return answers

    def _check(self, one: tuple[str, str], answer: Answer, victim: str, number: signal.Signals) -> None:
        self.counts["requests"] += 1
        self.counts[answer.error or "whole"] += 1
        self.longest_s = max(self.longest_s, answer.seconds)
        allowed = {"", "engine_unavailable"}
        if victim == "api" and number is signal.SIGKILL:
            allowed.add("broken")
        if victim == "trial" and number is signal.SIGSTOP and one[0] == "grammar stream":
            allowed.add("invalid_request_error")  # its trial did not end in time
        if answer.error not in allowed:
            self.violations.append(f"{one} ended with {answer.error!r} ({answer.message}) after {answer.seconds:.1f} s")
        if not one[0].startswith("unseeded") and not answer.is_part_of(self._references[one]):
            self.violations.append(f"{one} got different tokens: {answer} instead of {self._references[one]}")

    def _disturb(self, victim: str, number: signal.Signals) -> None:
        wait_for(f"a process of kind {victim}", READY_S, lambda: bool(self.server.pids()[victim]))
        pid = self._rng.choice(self.server.pids()[victim])
        self.counts[f"{victim} {number.name}"] += 1
        self.num_kills += number is signal.SIGKILL
        place, start_s = self.server.log_len, time.monotonic()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if victim == "engine":
            self._watch_recovery(pid, number, place, start_s)
        elif victim == "trial" and number is signal.SIGSTOP:
            threading.Timer(self._rng.uniform(1, 30), self._end_stopped, [pid]).start()
        elif victim == "api" and number is signal.SIGSTOP:
            time.sleep(self._rng.uniform(1, 12))
            os.kill(pid, signal.SIGCONT)
        elif victim == "api":
            self._replace_server()

    @staticmethod
    def _end_stopped(pid: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _watch_recovery(self, old: int, number: signal.Signals, place: int, start_s: float) -> None:
        server = self.server
        limit_s = TRUTH_S if number is signal.SIGSTOP else self._slack_s
        try:
            wait_for("/health to report the failure", limit_s + self._slack_s, lambda: server.answers("/health", 503))
            truth_s = time.monotonic() - start_s
            self.truths_s.append(truth_s)
            if truth_s > max(TRUTH_S, self._slack_s):
                self.violations.append(f"/health reported the failure only after {truth_s:.1f} s")
            wait_for("another engine", READY_S, lambda: server.answers("/health", 200))
        except TimeoutError as error:
            self.violations.append(str(error))
            return
        delay_s = sum(server.found(r"starting another engine in ([\d.]+) s", place))
        recovery_s = time.monotonic() - start_s - delay_s - (truth_s if number is signal.SIGSTOP else 0.0)
        self.recoveries_s.append(recovery_s)
        if recovery_s > server.load_s + self._slack_s:
            self.violations.append(f"recovery took {recovery_s:.1f} s; a start takes {server.load_s:.1f} s")
        if old in server.pids()["engine"]:
            self.violations.append("the engine that was killed still runs")

    def _replace_server(self) -> None:
        """Start a new server, as a service manager does. Processes that the killed one has left are a violation."""
        old = self.server
        old.process.wait(READY_S)
        try:
            wait_for("the end of all children", self._slack_s, lambda: not any(old.pids().values()))
        except TimeoutError as error:
            self.violations.append(f"{error}: {old.pids()}")
        self._count_replays()
        self.server = self._start()

    def _count_replays(self) -> None:
        self.counts["replayed"] += int(sum(self.server.found(r"(\d+) requests wait for another engine")))

    def _check_rest(self) -> None:
        """Check the server after every client has its response."""
        server = self.server
        try:
            wait_for("a healthy server", READY_S, lambda: server.answers("/ready", 200))
        except TimeoutError as error:
            self.violations.append(str(error))
        if not server.wait_until_idle(10 + self._slack_s):
            self.violations.append("blocks or requests are left in the engine")
        pids = server.pids()
        if [len(pids["api"]), len(pids["engine"])] != [1, 1] or len(pids["trial"]) > 2:
            self.violations.append(f"processes that should not be there: {pids}")

    def finish(self) -> None:
        """End the server, and check that no process is left."""
        self._count_replays()
        if (status := self.server.close()) != 0:
            self.violations.append(f"the server ended with status {status}")
        if any(left := self.server.pids().values()):
            self.violations.append(f"processes are left at the end: {[*left]}")

    def kill(self) -> None:
        """Kill the server."""
        self.server.process.kill()
        self.server.process.wait()


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all rounds and return the result as one row."""
    began_s = time.monotonic()
    chaos = Chaos(options, folder)
    try:
        chaos.run(options.count)
        chaos.finish()
    finally:
        chaos.kill()
    recoveries_s, truths_s = chaos.recoveries_s or [0.0], chaos.truths_s or [0.0]
    return {
        "tool": "kills", "seed": options.seed, "count": chaos.num_kills,
        "minutes": round((time.monotonic() - began_s) / 60, 1),
        "counts": dict(sorted(chaos.counts.items())), "load_s": round(chaos.server.load_s, 2),
        "recovery_s": {"median": round(median(recoveries_s), 2), "max": round(max(recoveries_s), 2)},
        "health_s": {"median": round(median(truths_s), 2), "max": round(max(truths_s), 2)},
        "longest_answer_s": round(chaos.longest_s, 1),
        "num_wrong": len(chaos.violations), "wrong": chaos.violations[:20],
    }  # fmt: skip


def main() -> int:
    """Run the rounds and print the result; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, metavar="N", help="processes to kill; more are stopped")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hang-timeout-s", type=float, default=_HANG_TIMEOUT_S)
    parser.add_argument(
        "--slack-s", type=float, default=_SLACK_S, help="seconds that recovery may take besides loading"
    )
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        row = run(options, Path(folder))
    print(json.dumps(row))
    if options.record:
        counts = [{"signals, answers": name, "number": number} for name, number in row["counts"].items()]
        summary = (
            f"{row['count']} processes were killed in {row['minutes']} minutes, and others stopped. Loading an engine "
            f"takes {row['load_s']} s. A new engine was ready {row['recovery_s']['median']} s after a kill (median; "
            f"at most {row['recovery_s']['max']} s), without delays and the time to detect a stopped process. "
            f"`/health` reported the failure after {row['health_s']['median']} s (median; at most "
            f"{row['health_s']['max']} s). The longest response took {row['longest_answer_s']} s. "
            f"Violations: {row['num_wrong']}."
        )
        limits = {"hang-timeout-s": options.hang_timeout_s, "slack-s": options.slack_s}
        usual = {"hang-timeout-s": _HANG_TIMEOUT_S, "slack-s": _SLACK_S}
        given = "".join(f" --{name} {value:g}" for name, value in limits.items() if value != usual[name])
        command = f"python -m reliability.kills --count {options.count} --seed {options.seed}{given}"
        record("kills", command, [summary, "", *table(counts)])
    return 1 if row["num_wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())

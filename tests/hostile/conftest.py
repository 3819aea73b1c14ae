"""Servers to attack, and the summary of what was tried."""

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from tests.clients.served import KEY, quire_serve
from tests.hostile.target import RESULTS, Target

SHORT = ["--header-timeout-s", "1", "--body-timeout-s", "2", "--idle-timeout-s", "3"]
OTHER_KEY = "the-key-of-another-tenant"


@pytest.fixture(scope="session")
def guarded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """Two keys, a log in JSON, short time limits."""
    folder = tmp_path_factory.mktemp("guarded")
    with (
        quire_serve(folder, *SHORT, keys=f"{KEY},{OTHER_KEY}") as served,
        contextlib.closing(Target(served, folder / "serve.log")) as target,
    ):
        yield target
        target.check_whole_run()


@pytest.fixture(scope="session")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    """No key, a log in text, and whatever clients may be allowed to do: templates of their own."""
    folder = tmp_path_factory.mktemp("open")
    more = ["--log-format", "text", "--allow-client-chat-template"]
    with (
        quire_serve(folder, *SHORT, *more, keys="") as served,
        contextlib.closing(Target(served, folder / "serve.log", key=None)) as target,
    ):
        yield target
        target.check_whole_run()


@pytest.fixture
def guarded(guarded_server: Target, request: pytest.FixtureRequest) -> Iterator[Target]:
    """The server with keys. The test runs beside a canary, and does no harm."""
    with guarded_server.unharmed(request.node.name):
        yield guarded_server


@pytest.fixture
def open_to_all(open_server: Target, request: pytest.FixtureRequest) -> Iterator[Target]:
    """The same of the one without keys."""
    with open_server.unharmed(request.node.name):
        yield open_server


@pytest.fixture(scope="session")
def llm() -> LLM:
    """Offline, in this process."""
    return LLM(num_gpu_blocks_override=512, max_num_seqs=32)


# The summary


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of xdist hands its results to the one that tells them."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["hostile"] = [dict(RESULTS.counts), RESULTS.worst]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a process of xdist has seen."""
    counts, worst = getattr(node, "workeroutput", {}).get("hostile", ({}, {}))
    RESULTS.counts.update(counts)
    for what, (value, name) in worst.items():
        RESULTS.note(what, value, name)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Counts, at the end of any run that has these tests in it; also to the file that QUIRE_HOSTILE_SUMMARY names."""
    if not RESULTS.counts:
        return
    tests = Counter({name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error")})
    terminalreporter.section("hostile input")
    for name, count in sorted(RESULTS.counts.items()):
        terminalreporter.write_line(f"{count:9,}  {name}")
    for what, (value, name) in sorted(RESULTS.worst.items()):
        terminalreporter.write_line(f"{value:9,g}  {what}, at the most: {name}")
    if path := os.environ.get("QUIRE_HOSTILE_SUMMARY"):
        summary = {"tests": dict(tests), "counts": dict(RESULTS.counts), "worst": RESULTS.worst}
        Path(path).write_text(json.dumps(summary))

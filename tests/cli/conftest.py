"""Commands over a scripted model."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from quire.cli import demo, main
from quire.cli.arguments import options
from quire.cli.bench import throughput

from ..scripted_engine import scripted_llm
from .command import Run


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Commands get a scripted LLM; what they asked for and the executor are in this dict."""
    seen: dict[str, Any] = {}

    def load(parsed: Any) -> Any:
        kwargs = options.engine_kwargs(parsed)
        llm, seen["executor"] = scripted_llm(**kwargs)
        seen.update(llm=llm, kwargs=kwargs)
        return llm

    for module in (options, throughput, demo):
        monkeypatch.setattr(module, "load_llm", load)
    yield seen
    if seen:
        assert not seen["llm"].engine.has_unfinished_requests()


@pytest.fixture
def run(loaded: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line in this process; returns (exit status, standard output, standard error)."""

    def run_command(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        from io import StringIO

        monkeypatch.setattr(sys, "stdin", StringIO(stdin))
        try:
            status = main(arguments)
        except SystemExit as error:
            status = int(error.code or 0)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run_command

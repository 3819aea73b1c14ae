"""The commands as a user runs them, on the embedded checkpoint: real weights, real kernels."""

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import EngineArgs
from tests import forks
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter


@pytest.fixture
def quire(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    command = forks.command(tmp_path, os.environ)

    def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run([command, *arguments], input=stdin, capture_output=True, text=True, timeout=300)

    return run


def test_generate_answers_with_the_docstring() -> None:
    """This one is a Python that begins anew; the others are forked."""
    command = [sys.executable, "-m", "quire", "generate", "--prompt", "What does json.dumps do?"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    first_paragraph = (inspect.getdoc(json.dumps) or "").split("\n\n")[0]
    assert (result.returncode, result.stdout) == (0, first_paragraph + "\n"), result.stderr
    assert "KV cache" in result.stderr, "the memory plan is shown, but not among the output"
    assert "nanobind" not in result.stderr, "objects that live until the process ends are no alarm"


def test_demo_runs_and_reuses_prefixes(quire: Any) -> None:
    result = quire("demo")
    assert result.returncode == 0, result.stderr
    assert "Serialize ``obj`` to a JSON formatted ``str``." in result.stdout
    assert '{"name": "json.dumps"' in result.stdout
    assert "hit rate 0%" not in result.stdout
    answers = [line for line in result.stdout.splitlines() if "random bytes suitable for cryptographic use" in line]
    assert answers[1] == f"Arr, matey! {answers[0]} Yo ho ho!", "with and without an adapter"


def test_chat_remembers_the_conversation(quire: Any) -> None:
    result = quire("chat", stdin="What does json.dumps do?\nSummarize json.dumps as JSON.\n")
    assert result.returncode == 0, result.stderr
    first, _, second, figures = result.stdout.splitlines()
    assert first in second
    assert " 0 of" not in figures, "the first turn is found in the prefix cache"


@pytest.mark.slow
def test_generate_uses_an_adapter(quire: Any, tmp_path: Path) -> None:
    sizes = tiny_sizes(EngineArgs().resolve().model)
    folder = write_adapter(tmp_path / "adapter", make_tensors(sizes, 2), r=2, lora_alpha=2)
    command = ("generate", "--raw", "--prompt", "def f(", "--max-tokens", "8")
    plain, adapted = (quire(*command, *more) for more in ((), ("--lora", str(folder))))
    assert plain.stdout != adapted.stdout
    assert (plain.returncode, adapted.returncode) == (0, 0)
    (tmp_path / "empty").mkdir()
    refused = quire(*command, "--lora", str(tmp_path / "empty"))
    assert (refused.returncode, refused.stdout) == (2, "")
    named = quire("chat", "--lora", f"mine={folder}", stdin="What does json.dumps do?\n")
    assert named.returncode == 0, named.stderr
    assert "to a JSON formatted" not in named.stdout
    reason = f"{tmp_path / 'empty'} has no adapter_config.json: not the folder of a PEFT adapter"
    assert refused.stderr.splitlines()[-1] == f"quire: {reason}"

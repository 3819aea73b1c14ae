"""The commands as a user runs them, on the embedded checkpoint: real weights, real kernels."""

import inspect
import json
import subprocess
import sys


def quire(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "quire", *arguments], input=stdin, capture_output=True, text=True, timeout=300
    )


def test_generate_answers_with_the_docstring() -> None:
    result = quire("generate", "--prompt", "What does json.dumps do?")
    first_paragraph = (inspect.getdoc(json.dumps) or "").split("\n\n")[0]
    assert (result.returncode, result.stdout) == (0, first_paragraph + "\n"), result.stderr
    assert "KV cache" in result.stderr, "the memory plan is shown, but not among the output"


def test_demo_runs_and_reuses_prefixes() -> None:
    result = quire("demo")
    assert result.returncode == 0, result.stderr
    assert "Serialize ``obj`` to a JSON formatted ``str``." in result.stdout
    assert '{"name": "json.dumps"' in result.stdout
    assert "hit rate 0%" not in result.stdout


def test_chat_remembers_the_conversation() -> None:
    result = quire("chat", stdin="What does json.dumps do?\nSummarize json.dumps as JSON.\n")
    assert result.returncode == 0, result.stderr
    first, _, second, figures = result.stdout.splitlines()
    assert first in second
    assert " 0 of" not in figures, "the first turn is found in the prefix cache"

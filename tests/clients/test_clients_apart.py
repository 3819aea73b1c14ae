"""Clients that need older packages than the others: each runs as a program in an environment of its own.

The program runs the client's example in docs/clients.md, then its own calls, and reports their results as JSON. It ends
with an error if it tries to reach another machine.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.documented import examples, for_server
from tests.clients.served import KEY, Served

PYTHON = Path(sys.prefix) / "clients-apart" / "bin" / "python"
FOLDER = Path(__file__).parent / "apart"
ANSWER = "Serialize ``obj`` to a JSON formatted ``str``."
ENTRIES = [{"kind": kind, "is_public": is_public} for kind in ("function", "class") for is_public in (True, False)]


def run(program: str, stdin: str, url: str) -> subprocess.CompletedProcess[str]:
    if not PYTHON.exists():
        assert "CI" not in os.environ, "CI must test these clients: make .venv/.clients"
        pytest.skip(f"there is no {PYTHON}: `make .venv/.clients` installs it")
    command = [str(PYTHON), str(FOLDER / "launch.py"), program, url, KEY]
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    return subprocess.run(command, input=stdin, env=environment, capture_output=True, text=True, check=False)


def results(section: str, program: str, served: Served) -> tuple[str, dict[str, Any]]:
    """What the section's example prints, and what the program reports."""
    (example,) = examples(section, "python")
    done = run(program, for_server(example, served), served.url)
    assert done.returncode == 0, done.stderr
    printed, _, report = done.stdout.strip().rpartition("\n")
    return printed.strip(), json.loads(report)


def test_litellm(served: Served) -> None:
    printed, found = results("LiteLLM", "run_litellm.py", served)
    assert printed == ANSWER
    assert set(found["answers"]) == {"openai", "hosted_vllm", "anthropic", "ollama_chat"}
    for whole, streamed in [*found["answers"].values(), found["asynchronous"]]:
        assert whole == streamed == ANSWER
    assert 1 <= found["completion"] <= 4
    status, message = found["embedding"]
    assert status == 400
    assert "generates text: it has no embeddings" in message


def test_llama_index(served: Served) -> None:
    printed, found = results("LlamaIndex", "run_llama_index.py", served)
    assert printed == ANSWER
    assert {*found["chats"], *found["asynchronous"]} == {ANSWER}
    whole, streamed = found["completions"]
    assert whole == streamed != ""
    assert len(found["structured"]) == 2
    assert set(found["structured"]) <= {"function", "class"}


def test_instructor(served: Served) -> None:
    printed, found = results("Instructor", "run_instructor.py", served)
    assert printed.startswith("is_public=")
    assert set(found["made"]) == {"TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"}
    assert all(made in ENTRIES for made in found["made"].values())


@pytest.mark.parametrize("reach", ["getaddrinfo('quire.invalid', 80)", "socket().connect(('192.0.2.1', 9))"])
def test_a_program_that_leaves_this_machine_fails(reach: str) -> None:
    done = run("target.py", f"import socket\ntry: socket.{reach}\nexcept Exception: pass", "")
    assert done.returncode == 3
    assert "it tried to reach" in done.stderr

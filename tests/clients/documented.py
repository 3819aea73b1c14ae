"""The examples of docs/clients.md, made ready for a server under test."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.clients.served import KEY, Served

ROOT = Path(__file__).parents[2]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
_URL = "http://127.0.0.1:8000"
_PLACES_OF_KEYS = ('api_key="none"', "api_key=none", "auth_token=none", "OPENAI_API_KEY=none", "Bearer none")


@cache
def examples(section: str, language: str) -> list[str]:
    """The blocks of one language under a heading."""
    text = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found, f"docs/clients.md has no section {section}"
    return re.findall(rf"^```{language}\n(.*?)^```$", found[1], re.MULTILINE | re.DOTALL)


def for_server(example: str, served: Served) -> str:
    """With its address and its key."""
    assert _URL in example
    for place in _PLACES_OF_KEYS:
        example = example.replace(place, place.replace("none", KEY))
    return example.replace(_URL, served.url)


def run_command(section: str, served: Served, changes: dict[str, str], **environment: str) -> str:
    """Run the section's command with some of its words changed; its output. Fails with it."""
    (command,) = examples(section, "bash")
    command = for_server(command, served)
    for word, other in changes.items():
        assert word in command
        command = command.replace(word, other)
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
    run = subprocess.run(
        ["bash", "-euc", command],
        cwd=ROOT,
        env=os.environ | OFFLINE | environment | {"PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout

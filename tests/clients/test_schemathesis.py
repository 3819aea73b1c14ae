"""Schemathesis against a real server: requests, good and bad, made from /openapi.json, and what may be answered.

QUIRE_SCHEMATHESIS has further options for it, such as `--max-examples 1000 --seed 2`.
"""

import os
import urllib.request
from pathlib import Path

from tests.clients.documented import run_command
from tests.clients.served import quire_serve

SMALL = ["--max-model-len", "128", "--max-choices-per-request", "4", "--request-timeout-s", "30"]


def test_every_answer_is_documented(tmp_path: Path) -> None:
    more = os.environ.get("QUIRE_SCHEMATHESIS", "")
    with quire_serve(tmp_path, *SMALL) as served:
        run_command("Schemathesis", served, {"--no-shrink": f"--no-shrink {more}"})
        with urllib.request.urlopen(f"{served.url}/health") as answer:
            assert answer.status == 200

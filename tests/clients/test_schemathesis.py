"""Schemathesis against a real server: requests, good and bad, made from /openapi.json, and what may be answered.

More of them: `QUIRE_SCHEMATHESIS_EXAMPLES=1000 make test ARGS=tests/clients/test_schemathesis.py`, with another
`QUIRE_SCHEMATHESIS_SEED` each time.
"""

import os
import subprocess
import sys
from pathlib import Path

import httpx

from tests.clients.served import KEY, quire_serve

EXAMPLES = os.environ.get("QUIRE_SCHEMATHESIS_EXAMPLES", "8")
SEED = os.environ.get("QUIRE_SCHEMATHESIS_SEED", "1")
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance,ignored_auth"  # noqa: E501
"""all but those that take every well-formed request for a right one: limits of the model are no part of the schema"""
SMALL = ["--max-model-len", "128", "--max-choices-per-request", "4", "--request-timeout-s", "30"]


def test_every_answer_is_documented(tmp_path: Path) -> None:
    with quire_serve(tmp_path, *SMALL) as served:
        command = [sys.executable, "-c", "import schemathesis.cli; schemathesis.cli.schemathesis()", "run"]
        options = {
            "--header": f"Authorization: Bearer {KEY}",
            "--checks": CHECKS,
            "--exclude-path": "/debug/cache/events",  # a stream without end
            "--phases": "examples,coverage,fuzzing",
            "--max-examples": EXAMPLES,
            "--seed": SEED,
            "--generation-database": "none",
            "--request-timeout": "60",
        }
        flags = ["--continue-on-failure", "--no-shrink", "--no-color"]
        arguments = [f"{name}={value}" for name, value in options.items()]
        run = subprocess.run(
            [*command, f"{served.url}/openapi.json", *arguments, *flags],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout + run.stderr
        assert httpx.get(f"{served.url}/health").status_code == 200

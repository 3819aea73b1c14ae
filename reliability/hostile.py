"""Run all tests of tests/hostile, including those that `make test` leaves out, and count the outcomes.

    python -m reliability.hostile [--record] [pytest's arguments]

Each case runs beside a request whose tokens must not change (the canary), and most cases also run alone and offline;
tests/hostile/target.py says what else must stay the same. Time limits are those of a quiet machine, multiplied by
QUIRE_HOSTILE_PATIENCE. Prints one line of JSON; the exit status is pytest's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from reliability.page import record, table

_PATIENCE = "QUIRE_HOSTILE_PATIENCE"
FOLDER = Path(__file__).resolve().parents[1] / "tests" / "hostile"


def main() -> int:
    """Run the tests and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "summary.json"
        environment = {_PATIENCE: "1"} | os.environ | {"QUIRE_HOSTILE_SUMMARY": str(path)}
        command = [sys.executable, "-m", "pytest", str(FOLDER), "-m", "thorough or not thorough", *others]
        status = subprocess.run(command, env=environment).returncode
        if not path.exists():
            return status or 1
        summary = json.loads(path.read_text())
    print(json.dumps({"tool": "hostile", "status": status} | summary))
    if options.record:
        counts = [{"what": what, "number": number} for what, number in sorted(summary["counts"].items())]
        worst = [
            {"the most": what, "value": value, "in": name} for what, (value, name) in sorted(summary["worst"].items())
        ]
        head = ", ".join(f"{number} {what}" for what, number in summary["tests"].items())
        patience = f"{_PATIENCE}={os.environ[_PATIENCE]} " if _PATIENCE in os.environ else ""
        record("hostile", f"{patience}make hostile", [f"Tests: {head}.", "", *table(counts), "", *table(worst)])
    return status


if __name__ == "__main__":
    sys.exit(main())

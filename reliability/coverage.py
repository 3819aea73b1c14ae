"""Check that the tests cover every branch of the scheduler, the block manager, validation and authentication.

    python -m reliability.coverage [--all] [--record] [pytest's arguments]

pyproject.toml names the files ([tool.coverage]). With `--all` every test of `make test-all` runs, once. Only the tests
chosen here are measured, with or without `--all`, because Python code takes twice as long while it is measured.
Prints one JSON line; the exit status is 0 if all tests pass and every statement and branch is taken.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

from reliability.page import record, table

ROOT = Path(__file__).resolve().parents[1]
SERVER_TESTS = (
    "adapters", "admission", "answers_bad_input", "app", "auth", "background_responses", "bad_input", "bodies", "chat",
    "completions", "config", "embeddings", "endpoints", "hostile", "messages", "messages_translation", "operations",
    "predictions", "responses", "responses_translation", "shared_fields", "streams",
)  # fmt: skip
TESTS = (
    "tests/config",
    "tests/engine",
    "tests/kv",
    "tests/grammar/test_structural_tags.py",
    "tests/grammar/test_structures.py",
    "tests/grammar/test_waiting.py",
    "tests/grammar/test_refused.py::test_refused_when_made",
    "tests/models/test_bad_checkpoints.py",
    "tests/models/test_bad_families.py",
    "tests/models/test_bad_weights.py",
    "tests/models/test_compressed_refused.py",
    "tests/models/test_compressed_tensors.py",
    "tests/models/test_gguf_architectures.py",
    "tests/models/test_loading.py",
    "tests/models/test_packed_integers.py",
    "tests/parallel/test_nodes.py",
    "tests/parallel/test_shares.py",
    "tests/pooling",
    "tests/simulate/test_fleet.py::test_a_lane_makes_most_steps_of_an_ordinary_run",
    "tests/speculation",
    *(f"tests/server/test_{name}.py" for name in SERVER_TESTS),
    "tests/test_compat.py",
)
LONG = (
    "test_batch_invariance", "test_mixed_requests", "test_planted_bugs", "test_block_manager_stateful", "anything",
    "no_schedule_changes", "every_schedule", "a_snapshot_and_its_differences", "candidates_are_cleared",
    "adds_up_to_the_whole", "while_others_stream", "the_default_length", "hardly_more_memory", "makes_steps_fail",
    "however_deep_it_is", "output_has_the_form", "requests_without_slots_block", "any_schedule_gives",
    "test_every_weight_", "small_cache_and_few_slots", "a_machine_that_becomes_slower",
    "test_planted_drafting_bugs", "no_drafter_changes_a_bit", "no_head_changes_a_bit",
)  # fmt: skip
"""Parts of the names of slow tests that cover no branch which the other tests do not cover."""

IMPORTED = ("torch", "starlette.applications", "huggingface_hub", "tokenizers", "uvicorn")
"""Packages that the files import and that take seconds to load, twice as many while they are measured."""


def is_measured(test: str) -> bool:
    """Whether the test with this pytest id is one of those that take the branches."""
    chosen = any(test == name or test.startswith((f"{name}/", f"{name}::", f"{name}[")) for name in TESTS)
    return chosen and not any(part in test for part in LONG)


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Where pytest has this module as a plugin, and this process runs tests itself: measure those that are chosen."""
    if not early_config.known_args_namespace.numprocesses or "PYTEST_XDIST_WORKER" in os.environ:
        early_config.pluginmanager.register(Measurement())


class Measurement:
    """A plugin of pytest that measures the chosen tests. pytest-cov cannot be paused in processes of xdist:
    it begins twice there, and what one pauses the other resumes."""

    def __init__(self) -> None:
        """Load the files while they are measured, but not what they import of others."""
        self._coverage = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"), data_suffix=True)
        self._is_on = False
        for name in IMPORTED:
            importlib.import_module(name)
        self._measure(True)
        for path in wanted_files():
            name = ".".join(Path(path).relative_to("src").with_suffix("").parts)
            importlib.import_module(name.removesuffix(".__init__"))
        self._measure(False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure a chosen test with its fixtures. Chosen tests lie together, so this seldom changes anything."""
        self._measure(is_measured(item.nodeid))
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        """Write what was measured into a file of this process, beside the others' files."""
        self._measure(False)
        self._coverage.save()

    def _measure(self, wanted: bool) -> None:
        if wanted != self._is_on:
            (self._coverage.start if wanted else self._coverage.stop)()
            self._is_on = wanted


def wanted_files(root: Path = ROOT) -> list[str]:
    """Return the paths of the files that must be covered, relative to the repository."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = project["tool"]["coverage"]["run"]["include"]
    return sorted(str(path.relative_to(root)) for pattern in patterns for path in root.glob(pattern))


def combined(data_file: Path) -> dict[str, Any]:
    """Return coverage.py's JSON report of what processes have measured into files whose names begin so. Raises
    coverage.CoverageException if there are none."""
    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"), data_file=str(data_file))
    measured.combine()
    path = data_file.with_suffix(".json")
    measured.json_report(outfile=str(path))
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return report


def gaps(report: dict[str, Any], wanted: list[str]) -> Iterator[str]:
    """Yield a line for each file with uncovered lines or branches in coverage.py's JSON report."""
    for name in wanted:
        found = report["files"].get(name)
        if found is None:
            yield f"{name}: not loaded"
        elif found["missing_lines"] or found["missing_branches"]:
            branches = [f"{start}->{'exit' if end < 0 else end}" for start, end in found["missing_branches"]]
            yield f"{name}: {', '.join([*map(str, found['missing_lines']), *branches])}"


def rows(report: dict[str, Any], wanted: list[str]) -> list[dict[str, object]]:
    """Return a row of the table for each folder."""
    folders: dict[str, list[str]] = {}
    for name in wanted:
        folders.setdefault(str(Path(name).parent), []).append(name)
    return [
        {
            "folder": f"`{folder}`",
            "files": ", ".join(Path(name).stem for name in names if Path(name).stem != "__init__"),
            "statements": sum(report["files"][name]["summary"]["num_statements"] for name in names),
            "branches": sum(report["files"][name]["summary"]["num_branches"] for name in names),
        }
        for folder, names in folders.items()
    ]


def main() -> int:
    """Run the tests and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run all other tests too, without measuring them")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    options, others = parser.parse_known_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pytest", "--hypothesis-profile=all", "-m", "not thorough"]
        command += ["-p", "reliability.coverage", *others]
        if not options.all:
            command += [*TESTS, "-k", f"not ({' or '.join(LONG)})"]
        environment = {"CI": "true"} | os.environ | {"COVERAGE_FILE": str(Path(folder) / "data")}
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        report = combined(Path(folder) / "data")
    wanted = wanted_files()
    missed = list(gaps(report, wanted))
    print(*missed, sep="\n", end="\n" if missed else "")
    counts = {name: report["totals"][name] for name in ("num_statements", "num_branches")}
    seconds = round(time.monotonic() - began)
    print(json.dumps({"tool": "coverage", "status": status, "files": len(wanted), "missed": missed} | counts))
    if options.record and not status and not missed:
        head = "{num_statements:,} statements and {num_branches:,} branches, all covered".format(**counts)
        record("coverage", "make coverage", [f"{head}, in {seconds} s.", "", *table(rows(report, wanted))])
    return status or int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())

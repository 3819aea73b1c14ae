"""The programs that try to break the server: that they see what they look for, and find nothing in a short time."""

import dataclasses
import json
import logging
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import coverage
import pytest

import quire
from reliability import digest, sanitized_site
from reliability.answers import Answer
from reliability.coverage import combined, gaps, wanted_files
from reliability.overload import Load
from reliability.page import record, recorded_rows, table
from reliability.served import Exchange, Resources
from reliability.soak import MAX_GROWTH_BYTES, Tally, left_behind, not_injected

ROOT = Path(__file__).resolve().parents[1]


def soak(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "reliability.soak", "--minutes", "0.05", "--clients", "6", "--kill-every-s", "0"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert done.stdout, done.stderr
    return done


def test_every_program_has_its_section_of_the_page() -> None:
    found = [re.findall(r'\brecord\("([^"]+)"', path.read_text()) for path in (ROOT / "reliability").glob("*.py")]
    sections = [section for each in found for section in each]
    assert "engine_kills" in sections
    page = (ROOT / "docs" / "reliability.md").read_text()
    for section in sections:
        assert f"<!-- {section}: written by the command -->" in page, section


@pytest.mark.slow
def test_a_short_soak_leaves_nothing() -> None:
    for minutes in ("0.1", "0.5", "2"):  # longer where a busy machine did too little
        done = soak("--fault-probability", "0.001", "--minutes", minutes)
        row = json.loads(done.stdout)
        assert (done.returncode, row["wrong"]) == (0, []), done.stderr
        num_failed = row["num_failed_steps"] + row["num_failed_requests"]
        if row["done"].get("canary whole", 0) >= 2 and row["num_requests"] > 20 and num_failed > 0:
            return
    pytest.fail(f"nothing was tried in two minutes: {row}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "settle_s", "found"), [("files", "15", "files more"), ("blocks", "3", "blocks are in use")]
)
def test_a_planted_leak_is_found(kind: str, settle_s: str, found: str) -> None:
    done = soak("--plant-leak", kind, "--fault-probability", "0", "--settle-s", settle_s, "--minutes", "0.02")
    assert done.returncode == 1, done.stdout
    assert any(found in wrong for wrong in json.loads(done.stdout)["wrong"])


@pytest.mark.slow
def test_killing_each_kind_of_process_loses_nothing() -> None:
    command = [sys.executable, "-m", "reliability.kills", "--count", "3", "--slack-s", "60"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
    row = json.loads(done.stdout)
    assert (done.returncode, row["wrong"]) == (0, []), done.stderr
    assert {"engine SIGKILL", "trial SIGKILL", "api SIGKILL"} <= row["counts"].keys()
    assert row["counts"]["whole"] > 5


@pytest.mark.parametrize(
    ("texts", "error", "is_part"),
    [
        ({0: "abc", 1: "de"}, "", True),
        ({0: "abc"}, "", False),
        ({0: "abc", 1: "d"}, "", False),
        ({0: "ab"}, "broken", True),
        ({}, "engine_unavailable", True),
        ({0: "ax"}, "broken", False),
        ({2: "a"}, "broken", False),
    ],
)
def test_an_answer_that_was_cut_off_must_be_the_beginning_of_the_right_one(
    texts: dict[int, str], error: str, is_part: bool
) -> None:
    assert Answer(texts, error=error).is_part_of(Answer({0: "abc", 1: "de"})) == is_part


@pytest.mark.slow
def test_ten_times_the_rate_refuses_and_does_not_break() -> None:
    short = ["--rounds", "1", "--seqs", "2", "--output-len", "32"]
    for seconds in ("1", "4", "16"):  # longer where a busy machine did too little
        command = [sys.executable, "-m", "reliability.overload", *short, "--seconds", seconds]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
        assert done.returncode in (0, 1), done.stderr  # how fast it is depends on what else this machine does now
        if not done.stdout:  # no stream has ended, so that there is nothing to compare
            continue
        row = json.loads(done.stdout)
        assert row["met"]["polite_refused"], row
        assert {load["other"] for load in row["loads"]} == {0}
        loads = {load["load"]: load for load in row["loads"]}
        if loads["10 times the rate"]["refused (429)"] > 0 and loads["the flood"]["admitted"] > 0:
            return
    pytest.fail(f"nothing was refused, or all: {done.stdout}{done.stderr}")


def test_tokens_that_come_late_together_are_all_counted() -> None:
    def stream(*event_times: float, ended: bool = True) -> Exchange:
        return Exchange(100.0, 200, 0.1, list(event_times), bytearray(), ended)

    exchanges = [stream(101.0, 103.0, 104.0, 105.0), stream(103.0, 106.0), stream(104.0, ended=False)]
    load = Load([*exchanges, Exchange(100.0, 429, 0.02)], 100.0, 5.0, 8, {}, {})
    assert load.tokens_per_s == pytest.approx((8 * 3 / 4 + 8 / 2) / 4), "the first second is left out"
    assert load.gaps_s == [2.0, 1.0, 1.0, 3.0]
    row = load.row("any")
    assert (row["admitted"], row["refused (429)"], row["other"]) == (2, 1, 1)


def test_what_is_left_behind_is_named() -> None:
    before = {"API": Resources(10**6, 5, 20)}
    assert list(left_behind(before, {"API": Resources(10**6 + MAX_GROWTH_BYTES, 7, 22)})) == []
    found = list(left_behind(before, {"API": Resources(2 * MAX_GROWTH_BYTES, 8, 23)}))
    assert found == ["the API process uses 99 MB more", "the API process has 3 threads more",
                     "the API process has 3 files more"]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "status", "ended", "left", "is_wrong"),
    [
        ("stream", 200, True, False, False),
        ("stream", 200, False, True, False),
        ("stream", 200, False, False, True),
        ("stream", 500, True, False, True),
        ("stream", 503, True, False, False),
        ("wrong", 400, True, False, False),
        ("wrong", 200, True, False, True),
    ],
)
def test_violations_are_distinguished(kind: str, status: int, ended: bool, left: bool, is_wrong: bool) -> None:
    tally = Tally()
    tally.add(kind, Exchange(0.0, status=status, ended=ended), left)
    assert bool(tally.wrong) == is_wrong


def test_a_sanitized_extension_is_found_before_the_one_in_use(tmp_path: Path) -> None:
    shutil.copy(sanitized_site.__file__, tmp_path / "sitecustomize.py")
    (tmp_path / "_native.abi.so").touch()
    program = "import importlib.util, quire; print(importlib.util.find_spec('quire._native').origin, quire.__file__)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout.split() == [str(tmp_path / "_native.abi.so"), quire.__file__], done.stderr


def test_a_failure_that_was_not_injected_is_reported_with_its_log() -> None:
    logged = (
        "2026-11-22 10:00:00,000 ERROR request 'cmpl-aa-0' failed when its tokens were added: BufferError\nTraceback\n"
        "2026-11-22 10:00:01,000 ERROR request bb failed\nTraceback\nKeyError: 3\n"
        "2026-11-22 10:00:02,000 WARNING a step failed\nBufferError: injected at step.end\n"
    )
    (wrong,) = not_injected(logged, ["aa", "bb"])
    assert wrong.startswith("request bb failed without an injected fault")
    assert wrong.endswith("KeyError: 3\n")


def test_a_result_is_written_between_its_marks_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A\n<!-- b: written by the command -->\nold\n<!-- end of b -->\nafter\n")
    for number in (1, 2):
        record("b", "make b", table([{"what": "c", "number": number}]), page)
        text = page.read_text()
        assert f"| c | {number} |" in text
        assert recorded_rows("b", page) == [{"what": "c", "number": str(number)}]
        assert text.count("`make b`") == 1
        assert text.startswith("# A\n")
        assert text.endswith("<!-- end of b -->\nafter\n")
        assert "old" not in text
    with pytest.raises(ValueError, match="'c'"):
        record("c", "make c", [], page)


def test_a_file_that_coverage_is_to_be_measured_of_counts_though_no_test_loads_it() -> None:
    assert {
        "src/quire/engine/scheduling/scheduler.py",
        "src/quire/kv/tiers.py",
        "src/quire/server/http/auth.py",
    } <= set(wanted_files())
    whole: dict[str, object] = {"missing_lines": [], "missing_branches": []}
    files = {"a.py": whole, "b.py": {"missing_lines": [3], "missing_branches": [[5, 7], [8, -2]]}}
    assert list(gaps({"files": files}, ["a.py", "b.py", "c.py"])) == ["b.py: 3, 5->7, 8->exit", "c.py: not loaded"]


def test_no_line_can_be_exempted_from_coverage(tmp_path: Path) -> None:
    """What coverage.py takes for a mark by default means nothing here."""
    source, report = tmp_path / "decides.py", tmp_path / "report.json"
    source.write_text("x = 1\nif x:  # pragma: no branch\n    x = 2\nif x == 3:\n    x = 4  # pragma: no cover\n")
    measured = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"), include=[str(source)], data_file=None)
    with measured.collect():
        runpy.run_path(str(source))
    measured.json_report(outfile=str(report))
    ((name, _),) = (found := json.loads(report.read_text()))["files"].items()
    assert list(gaps(found, [name])) == [f"{name}: 5, 2->4, 4->5"]


def test_the_digest_of_a_group_is_reproducible_and_a_section_that_differs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = digest.Group("quick", {"model": "quire-draft", "dtype": "bfloat16"}, (("fcfs", "recompute"),), seed=1)
    monkeypatch.setattr(digest, "groups", lambda: [group])
    monkeypatch.setattr(logging.root.manager, "disable", logging.NOTSET)  # restored at the end
    before = tmp_path / "before.json"

    def run(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["digest", *arguments])
        return digest.main()

    assert run("--output", str(before)) == 0
    report = json.loads(before.read_text())
    ((name, section),) = report["sections"].items()
    assert len(section["requests"]) > 40
    assert section["counters"]["num_preemptions"] > 0
    section["digest"] = section["requests"]["beams"] = "0"
    changed = tmp_path / "changed.json"
    changed.write_text(json.dumps(report))
    after = ("--output", str(tmp_path / "after.json"))
    assert run(*after, "--compare", str(changed)) == 1
    assert f"{name}: 1 of {len(section['requests'])} requests differ: beams\n" in capsys.readouterr().err
    first, second = (json.loads(path.read_text()) for path in (before, tmp_path / "after.json"))
    assert second["digest"] == first["digest"]
    assert list(digest.differences(first, second)) == []


def test_one_bit_of_one_log_probability_changes_the_digest_and_a_missing_section_counts() -> None:
    rows = {"a": digest.encoded([[1, 2], -0.5]), "b": digest.encoded([[3], math.nextafter(-0.5, 0)])}
    section = dataclasses.asdict(digest.section_of(rows, {"num_steps": 3}))
    changed = dataclasses.asdict(digest.section_of(rows | {"a": digest.encoded([[1, 2], math.nextafter(-0.5, 0)])}, {}))
    old, new = {"sections": {"x": section, "y": section}}, {"sections": {"x": changed, "z": section}}
    assert list(digest.differences(old, old)) == []
    assert list(digest.differences(old, new)) == [
        "x: 1 of 2 requests differ: a",
        "y: only in the old report",
        "z: only in the new report",
    ]


def test_only_chosen_tests_are_measured_in_each_process(tmp_path: Path) -> None:
    """Measured, Python code takes twice as long."""
    (tmp_path / "plugin.py").write_text(
        "from reliability import coverage\n"
        "coverage.IMPORTED, coverage.wanted_files = (), lambda: ['src/quire/kv/place.py']\n"
        "from reliability.coverage import pytest_load_initial_conftests\n"
    )
    for folder, expected in (("kv", "is not None"), ("cli", "is None")):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / f"test_{folder}.py").write_text(
            f"import sys\ndef test_it():\n    assert sys.gettrace() {expected}\n"
        )
    data = tmp_path / "data"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "COVERAGE_FILE": str(data)}
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-n", "1", "--rootdir", str(tmp_path), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert combined(data)["files"].keys() == {"src/quire/kv/__init__.py", "src/quire/kv/place.py"}

"""Change one thing in a file at a time, and see that a test fails: what no test notices is not tested.

    python -m reliability.mutants [FILE ...] [--record] [--keep FOLDER [--again]]

mutmut (mutation_process.py) makes the mutants of one file after another and runs, for each, the tests of TESTS that
reach the changed function, until one fails; tests that take several times as long as they should count as failed. FILE:
part of a path; all files under coverage and the sampler without one. Mutants that change no behaviour are listed, with
the reason, in reliability/equivalent_mutants.toml and do not count. Prints what survived, a JSON line for each file and
one for all; the exit status is 1 if less than 95 % of a file's mutants are noticed, or a listed one does not exist.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reliability.coverage import LONG, wanted_files
from reliability.mutant_tests import TESTS
from reliability.page import PAGE, record, table

ROOT = Path(__file__).resolve().parents[1]
PROCESS = (sys.executable, "-P", str(ROOT / "reliability" / "mutation_process.py"))
EQUIVALENT = ROOT / "reliability" / "equivalent_mutants.toml"
SECTION = "mutants"
MIN_SCORE = 0.95
STATS = Path("mutants", "mutmut-stats.json")
"""which of a file's tests reach which function, in the folder of its mutants"""
MORE_FILES = ("src/quire/runner/sampling/*.py",)
"""besides those under coverage"""
IGNORED = shutil.ignore_patterns("__pycache__", "*.so")
UNDECORATED = ("property", "cached_property", "contextmanager", "asynccontextmanager")
"""decorators that are applied after the function in the copy, since mutmut leaves decorated functions as they are"""
IGNORED_LINES = (r"^\s*logger\.", r"^\s*fault_point\(")
"""what is logged, and where faults are injected"""
KILLED = {1, 2, 3, -6, -11}
"""exit status of pytest: a test failed, or nothing could be collected; or a signal"""
TIMED_OUT = {24, 36, 152, -9, -24}
SURVIVED = {0, 5, 33}
"""no test failed, or none reaches the function"""


@dataclass(frozen=True)
class Mutant:
    """One change, named by the text of its lines so that it is found again when others come and go."""

    file: str
    function: str
    line: str
    mutant: str


@dataclass
class Score:
    """What came of the mutants of one file."""

    file: str
    killed: int = 0
    timeouts: int = 0
    survived: list[Mutant] = field(default_factory=list)
    equivalent: list[Mutant] = field(default_factory=list)
    stale: list[Mutant] = field(default_factory=list)
    """listed as equivalent, but no such mutant is made, or a test fails with it"""
    seconds: float = 0.0

    @property
    def share(self) -> float:
        """Noticed, of those that do not count as equivalent."""
        noticed = self.killed + self.timeouts
        return noticed / (noticed + len(self.survived)) if noticed or self.survived else 1.0

    @property
    def row(self) -> dict[str, object]:
        """A row of the table in docs/reliability.md."""
        return {
            "file": f"`{self.file.removeprefix('src/quire/')}`",
            "killed": self.killed,
            "timeouts": self.timeouts,
            "survived": len(self.survived),
            "equivalent": len(self.equivalent),
            "score": f"{self.share:.1%}",
            "date": time.strftime("%Y-%m-%d"),
        }


def mutated_files(root: Path = ROOT) -> list[str]:
    """The files whose mutants are made, by their paths in the repository; files without functions are left out."""
    more = [str(path.relative_to(root)) for pattern in MORE_FILES for path in root.glob(pattern)]
    files = sorted({*wanted_files(root), *more})
    return [name for name in files if "def " in (root / name).read_text(encoding="utf-8")]


def selected_tests(file: str) -> list[str]:
    """The tests that concern a file: those of the longest prefix of its path that TESTS has."""
    name = file.removeprefix("src/quire/")
    prefixes = [prefix for prefix in TESTS if name.startswith(prefix)]
    if not prefixes:
        raise KeyError(f"{file}: no tests are named in reliability/mutant_tests.py")
    return [f"tests/{test}" for test in TESTS[max(prefixes, key=len)]]


def undecorated(source: str) -> str:
    """The same program with `name = decorator(name)` after a function instead of a decorator before it."""
    lines = source.splitlines()
    changes = []
    tree = ast.parse(source)
    owners: list[ast.Module | ast.ClassDef] = [tree, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
    for owner in owners:
        names = Counter(node.name for node in owner.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.decorator_list) != 1:
                continue
            decorator = ast.unparse(node.decorator_list[0])
            if decorator.rpartition(".")[2] in UNDECORATED and names[node.name] == 1:
                changes.append((node, decorator))
    for node, decorator in sorted(changes, key=lambda change: -change[0].lineno):
        assert node.end_lineno is not None
        lines.insert(node.end_lineno, f"{' ' * node.col_offset}{node.name} = {decorator}({node.name})")
        del lines[node.decorator_list[0].lineno - 1]
    return "\n".join(lines) + "\n"


def prepare(folder: Path, file: str) -> None:
    """The sources, the tests and mutmut's settings, for the mutants of one file."""
    copy_sources(folder / "src")
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=IGNORED)
    source = folder / file
    source.write_text(undecorated(source.read_text(encoding="utf-8")), encoding="utf-8")
    write_settings(folder, file)


def copy_sources(folder: Path, *left_out: str) -> None:
    """Copy the package, with the kernels that are installed, but not files with these names of paths in src."""
    for path in (ROOT / "src" / "quire").rglob("*"):
        name = str(path.relative_to(ROOT / "src"))
        if path.is_file() and name not in left_out and not IGNORED(str(path.parent), [path.parent.name, path.name]):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, folder / name)
    native = importlib.util.find_spec("quire._native")
    if native is not None and native.origin is not None:
        shutil.copy(native.origin, folder / "quire")


def settings_of(file: str) -> dict[str, Any]:
    """mutmut's settings, among them the tests that concern the file."""
    return {
        "source_paths": ["src"],
        "only_mutate": [file],
        "do_not_mutate_patterns": list(IGNORED_LINES),
        "pytest_add_cli_args_test_selection": selected_tests(file),
        "pytest_add_cli_args": ["-p", "no:cacheprovider", "-k", f"not ({' or '.join(LONG)})"],
        "timeout_multiplier": 1.0,
        "timeout_constant": 1.0,
        "process_isolation": "forkserver",
        "use_git_change_detection": False,
    }


def write_settings(folder: Path, file: str) -> None:
    """Those of the project, and mutmut's."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    own = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings_of(file).items())
    (folder / "pyproject.toml").write_text(f"{project}\n[tool.mutmut]\n{own}\n", encoding="utf-8")


def is_kept(folder: Path, file: str) -> bool:
    """Whether the folder has results of the file as it is, by some or all of the tests that concern it today."""
    stats, source = folder / STATS, undecorated((ROOT / file).read_text(encoding="utf-8"))
    if not stats.exists() or (folder / file).read_text(encoding="utf-8") != source:
        return False
    known = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mutmut"]
    today = settings_of(file)
    tests = "pytest_add_cli_args_test_selection"
    return known | {tests: []} == today | {tests: []} and set(known[tests]) <= set(today[tests])


def go_on(folder: Path, file: str) -> list[str]:
    """Bring the kept folder up to date, and return the mutants that its tests have not noticed."""
    for sources in (folder / "src", folder / "mutants" / "src"):
        copy_sources(sources, file.removeprefix("src/"))
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=IGNORED, dirs_exist_ok=True)
    write_settings(folder, file)
    stats = json.loads((folder / STATS).read_text(encoding="utf-8"))
    stats["config_fingerprint"] = {}  # otherwise mutmut forgets all where tests were added, which notice no fewer
    (folder / STATS).write_text(json.dumps(stats), encoding="utf-8")
    return [str(each["name"]) for each in report(folder, file) if each["status"] not in KILLED | TIMED_OUT]


def run(folder: Path, file: str, *names: str) -> None:
    """Run the tests on each mutant of a file, or on those of these names."""
    with (folder / "mutmut.log").open("w") as log:
        command = [*PROCESS, "run", "--max-children", "1", *names]
        ended = subprocess.run(command, cwd=folder, env=_environment(), stdout=log, stderr=subprocess.STDOUT)
    if ended.returncode:
        raise RuntimeError(f"mutmut failed on {file}:\n{(folder / 'mutmut.log').read_text()[-4000:]}")


def report(folder: Path, file: str) -> list[dict[str, object]]:
    """What came of each mutant, as mutation_process.py says it."""
    command = [*PROCESS, "report", file]
    done = subprocess.run(command, cwd=folder, env=_environment(), capture_output=True, check=True)
    reported: list[dict[str, object]] = json.loads(done.stdout)
    return reported


def _environment() -> dict[str, str]:
    quick = {"PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return {"CI": "true"} | os.environ | quick


def equivalent_mutants(path: Path = EQUIVALENT) -> dict[Mutant, str]:
    """Those that change no behaviour, with the reason."""
    listed = tomllib.loads(path.read_text(encoding="utf-8")).get("equivalent", [])
    return {Mutant(each["file"], each["function"], each["line"], each["mutant"]): each["reason"] for each in listed}


def judge(file: str, reported: list[dict[str, object]], equivalent: dict[Mutant, str]) -> Score:
    """Count them."""
    score, unused = Score(file), {mutant for mutant in equivalent if mutant.file == file}
    for each in reported:
        mutant, status = Mutant(file, *(str(each[name]) for name in ("function", "line", "mutant"))), each["status"]
        if status in KILLED:
            score.killed += 1
        elif status in TIMED_OUT:
            score.timeouts += 1
        elif status not in SURVIVED:
            raise RuntimeError(f"the tests of a mutant of {file} could not be run, status {status}: {mutant}")
        elif mutant in equivalent:
            score.equivalent.append(mutant)
            unused.discard(mutant)
        else:
            score.survived.append(mutant)
    score.stale = sorted(unused, key=lambda mutant: (mutant.function, mutant.line))
    return score


def measure(file: str, equivalent: dict[Mutant, str], keep: Path, *, again: bool) -> Score:
    """One file, in a folder of its own; with `again`, only what survived there if it is kept."""
    began = time.monotonic()
    folder = keep / file.removeprefix("src/quire/").replace("/", ".")
    if again and is_kept(folder, file):
        if names := go_on(folder, file):
            run(folder, file, *names)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        prepare(folder, file)
        run(folder, file)
    score = judge(file, report(folder, file), equivalent)
    score.seconds = round(time.monotonic() - began)
    return score


def recorded_rows(files: list[str], page: Path = PAGE) -> Iterator[dict[str, object]]:
    """The rows of earlier runs, of files that still exist."""
    text = page.read_text(encoding="utf-8").partition(f"<!-- {SECTION}: written")[2].partition("<!-- end of")[0]
    known = {f"`{file.removeprefix('src/quire/')}`" for file in files}
    for line in re.findall(r"^\| (`.*) \|$", text, re.MULTILINE):
        cells = line.split(" | ")
        if cells[0] in known:
            yield dict(zip(Score("").row, cells, strict=True))


def main() -> int:
    """Run and print; 1 if too little is noticed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE", help="part of a path")
    parser.add_argument("--record", action="store_true", help="write the result into docs/reliability.md")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave mutmut's folders here")
    parser.add_argument("--again", action="store_true", help="run only what survived the last time in that folder")
    options = parser.parse_args()
    if options.keep is not None:
        return measure_all(options, options.keep)
    with tempfile.TemporaryDirectory(prefix="quire-mutants-") as folder:
        return measure_all(options, Path(folder))


def measure_all(options: argparse.Namespace, keep: Path) -> int:
    """Each file that is asked for."""
    every, equivalent = mutated_files(), equivalent_mutants()
    chosen = [file for file in every if not options.files or any(part in file for part in options.files)]
    scores = []
    for file in chosen:
        score = measure(file, equivalent, keep, again=options.again)
        scores.append(score)
        for mutant in score.survived:
            print(f"survived: {mutant.function}\n  - {mutant.line}\n  + {mutant.mutant}")
        for mutant in score.stale:
            print(
                f"listed as equivalent, but noticed or gone: {mutant.function}\n  - {mutant.line}\n  + {mutant.mutant}"
            )
        print(json.dumps(score.row | {"seconds": score.seconds, "stale": len(score.stale)}), flush=True)
    below = [score.file for score in scores if score.share < MIN_SCORE]
    stale = sum(len(score.stale) for score in scores)
    noticed, survived = sum(s.killed + s.timeouts for s in scores), sum(len(s.survived) for s in scores)
    print(json.dumps({"tool": "mutants", "files": len(scores), "noticed": noticed, "survived": survived,
                      "below": below, "stale": stale}))  # fmt: skip
    if options.record:
        rows = {row["file"]: row for row in recorded_rows(every)} | {score.row["file"]: score.row for score in scores}
        missing = [name for file in every if (name := f"`{file.removeprefix('src/quire/')}`") not in rows]
        lines = table(rows[name] for name in sorted(rows, key=str))
        record(SECTION, "make mutants", [*lines, "", f"Not run yet: {', '.join(missing) or 'none'}."])
    return int(bool(below or stale or not scores))


if __name__ == "__main__":
    sys.exit(main())

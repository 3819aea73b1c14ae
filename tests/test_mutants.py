"""How mutants are made and counted."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from reliability.mutants import (
    MORE_FILES,
    Mutant,
    equivalent_mutants,
    is_kept,
    judge,
    mutated_files,
    recorded_rows,
    selected_tests,
    settings_of,
    undecorated,
    write_settings,
)
from reliability.page import record, table

ROOT = Path(__file__).resolve().parents[1]


def test_every_file_whose_mutants_are_made_has_tests_and_those_listed_exist() -> None:
    files = mutated_files()
    assert {"src/quire/engine/scheduling/policy.py", "src/quire/runner/sampling/random.py"} <= set(files)
    for file in files:
        assert all((ROOT / test.partition("::")[0]).exists() for test in selected_tests(file)), file
    with pytest.raises(KeyError, match="no tests are named"):
        selected_tests("src/quire/nowhere/at_all.py")
    for mutant, reason in equivalent_mutants().items():
        assert mutant.file in files, mutant
        assert len(reason) > 10, mutant


def test_every_pattern_of_what_is_measured_names_a_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for pattern in (*project["tool"]["coverage"]["run"]["include"], *MORE_FILES):
        assert list(ROOT.glob(pattern)), pattern


def test_mutants_are_counted_by_what_the_tests_said_of_them() -> None:
    def reported(line: str, status: int) -> dict[str, object]:
        return {"function": "f", "line": line, "mutant": "pass", "status": status}

    equivalent = {Mutant("a.py", "f", line, "pass"): "a reason" for line in ("same", "noticed", "gone")}
    equivalent[Mutant("b.py", "f", "other", "pass")] = "another file's"
    score = judge("a.py", [reported("same", 0), reported("noticed", 1), reported("slow", -24), reported("new", 0),
                           reported("untested", 33)], equivalent)  # fmt: skip
    assert (score.killed, score.timeouts, len(score.equivalent)) == (1, 1, 1)
    assert [mutant.line for mutant in score.survived] == ["new", "untested"]
    assert [mutant.line for mutant in score.stale] == ["gone", "noticed"]
    assert score.share == 0.5
    with pytest.raises(RuntimeError, match="could not be run, status 255"):
        judge("a.py", [reported("unknown test", 255)], {})


def test_results_count_again_for_the_same_file_and_where_tests_were_added(tmp_path: Path) -> None:
    file = "src/quire/config/parallel.py"
    assert not is_kept(tmp_path, file)
    (tmp_path / "mutants").mkdir()
    (tmp_path / "mutants" / "mutmut-stats.json").write_text("{}")
    copy, settings = tmp_path / file, tmp_path / "pyproject.toml"
    copy.parent.mkdir(parents=True)
    copy.write_text(undecorated((ROOT / file).read_text(encoding="utf-8")), encoding="utf-8")
    write_settings(tmp_path, file)
    assert tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["mutmut"] == settings_of(file)
    assert is_kept(tmp_path, file)
    written = settings.read_text(encoding="utf-8")
    settings.write_text(written.replace('"tests/config/test_bounds.py", ', ""), encoding="utf-8")
    assert is_kept(tmp_path, file), "the tests that were added may notice more"
    settings.write_text(written.replace("tests/config/test_bounds.py", "tests/other.py"), encoding="utf-8")
    assert not is_kept(tmp_path, file), "what only the other tests noticed is unknown"
    settings.write_text(written.replace("timeout_constant = 1.0", "timeout_constant = 2.0"), encoding="utf-8")
    assert not is_kept(tmp_path, file)
    settings.write_text(written, encoding="utf-8")
    copy.write_text("pass\n", encoding="utf-8")
    assert not is_kept(tmp_path, file), "another file"


def test_decorated_functions_mean_the_same_without_their_decorators() -> None:
    source = """
class Box:
    def __init__(self):
        self.size = 2

    @property
    def double(self):
        return 2 * self.size

    @property
    def both(self):
        return self.size

    @both.setter
    def both(self, size):
        self.size = size

    @staticmethod
    def one():
        return 1
"""
    changed = undecorated(source)
    assert "    double = property(double)\n" in changed
    assert changed.count("@property") == changed.count("@both.setter") == changed.count("@staticmethod") == 1
    scope: dict[str, Any] = {}
    exec(changed, scope)
    box = scope["Box"]()
    box.both = 5
    assert (box.double, box.one()) == (10, 1)


def test_rows_of_files_that_were_not_run_again_are_kept(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- mutants: written by the command -->\n<!-- end of mutants -->\n")
    rows = [judge(f"src/quire/{name}.py", [], {}).row for name in ("kept", "gone")]
    record("mutants", "make mutants", table(rows), page)
    assert list(recorded_rows(["src/quire/kept.py"], page)) == [{key: str(value) for key, value in rows[0].items()}]

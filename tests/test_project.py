"""The repository against itself: one version, documents that name what the code has, archives that hold the package."""

import dataclasses
import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from quire.common.version import __version__
from quire.config.args import EngineArgs
from quire.config.checkpoint.architectures import MODELS, POOLING_MODELS
from quire.server.config import ServerArgs

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("tools/**/*.md")])


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table_keys(document: str, heading: str) -> set[str]:
    """What stands in code quotes in the first column of the table under a heading."""
    section = read(document).split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))


def run_tool(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=False)


def test_the_version_is_written_once() -> None:
    assert "version" in PROJECT["project"]["dynamic"]
    assert importlib.metadata.version("quire") == __version__
    assert f"## [{__version__}]" in read("CHANGELOG.md") or "## [Unreleased]" in read("CHANGELOG.md")
    literals = [path for path in (ROOT / "src").rglob("*.py") if f'"{__version__}"' in path.read_text(encoding="utf-8")]
    assert [path.name for path in literals] == ["version.py"]


def test_what_make_installs_to_build_covers_what_the_build_asks_for() -> None:
    assert set(PROJECT["build-system"]["requires"]) <= set(PROJECT["dependency-groups"]["build"])


def test_make_pins_the_torch_the_package_asks_for() -> None:
    (torch,) = [wanted for wanted in PROJECT["project"]["dependencies"] if wanted.startswith("torch")]
    assert f"'{torch}'" in read("Makefile")
    assert f"'{torch}'" in PROJECT["tool"]["cibuildwheel"]["before-test"]


def test_what_is_promised_of_security_names_tests_that_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", read("SECURITY.md"))
    assert len(named) > 15
    for path, name in named:
        assert (ROOT / path).is_file(), path
        assert f"def {name}" in read(path), f"{path} has no {name}"


def test_every_dependency_has_its_reason() -> None:
    wanted = {re.split(r"[^\w-]", entry)[0] for entry in PROJECT["project"]["dependencies"]}
    assert table_keys("docs/dependencies.md", "At run time") == wanted
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = {re.split(r"[^\w-]", entry)[0] for group in extras for entry in group}
    assert table_keys("docs/dependencies.md", "For optional features") == wanted


def test_every_engine_argument_is_documented() -> None:
    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert table_keys("docs/configuration.md", "Engine arguments") == names


def test_every_server_argument_is_documented() -> None:
    names = {field.name for field in dataclasses.fields(ServerArgs)}
    assert table_keys("docs/configuration.md", "Server arguments") == names


def test_every_environment_variable_read_is_documented() -> None:
    sources = [
        path for folder in ("src", "csrc") for path in (ROOT / folder).rglob("*") if path.suffix in SOURCE_SUFFIXES
    ]
    read_here = {
        name
        for path in sources
        for pattern in (r'(?:environ(?:\.get)?|getenv)\W+"(\w+)"', r'"(\w+)" (?:not )?in os\.environ')
        for name in re.findall(pattern, path.read_text(encoding="utf-8"))
    }
    assert {"QUIRE_ISA", "NO_COLOR"} <= read_here
    section = read("docs/configuration.md").split("\n## Environment variables\n", 1)[1].split("\n## ", 1)[0]
    documented = {
        name for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE) for name in re.findall(r"\w+", row)
    }
    assert {name for name in documented if name.startswith("QUIRE_")} <= read_here <= documented


SOURCE_SUFFIXES = {".py", ".h", ".cpp"}
SOURCE_FOLDERS = ("src", "csrc", "tests", "tools", "reliability", "benchmarks")
MAX_LINES = 400
MAX_ENTRIES = 14


def test_no_source_file_is_longer_than_400_lines() -> None:
    suffixes = SOURCE_SUFFIXES | {".js", ".css", ".html"}
    paths = [path for name in SOURCE_FOLDERS for path in (ROOT / name).rglob("*") if path.suffix in suffixes]
    lines = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in paths}
    assert {"csrc/base/binding.h", "src/quire/server/page/files/index.html", "tests/test_project.py"} <= lines.keys()
    assert {path: num for path, num in lines.items() if num > MAX_LINES} == {}, "split it by subject"


def test_no_package_has_more_than_14_entries() -> None:
    root = ROOT / "src" / "quire"
    packages = [root, *(path for path in root.rglob("*") if path.is_dir() and path.name != "__pycache__")]
    entries = {
        str(package.relative_to(ROOT)): [
            path.name for path in package.iterdir() if path.name != "__pycache__" and path.suffix != ".so"
        ]
        for package in packages
        if package != root / "interfaces" / "compat"  # has vLLM's modules
    }
    assert len(entries["src/quire/config"]) > 10
    assert {name: found for name, found in entries.items() if len(found) > MAX_ENTRIES} == {}, "make a package of some"


def test_no_folder_of_kernels_has_more_than_14_entries() -> None:
    folders = [ROOT / "csrc", *(path for path in (ROOT / "csrc").rglob("*") if path.is_dir())]
    entries = {str(folder.relative_to(ROOT)): [path.name for path in folder.iterdir()] for folder in folders}
    assert {"csrc/isa/x86", "csrc/quantized/tiles"} <= entries.keys()
    assert {name: found for name, found in entries.items() if len(found) > MAX_ENTRIES} == {}, "make a folder of some"


def test_the_readme_example_runs_and_answers() -> None:
    example = read("README.md").split("```python\n")[1].split("```")[0]
    result = run_tool("-c", example)
    assert result.returncode == 0, result.stderr
    assert "Serialize" in result.stdout
    assert "Rename a file or directory" in result.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_in_documents_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    paths = re.findall(r"`((?:src|csrc|tests|tools|docs|benchmarks)/[\w./-]+)`", text)
    broken = [link for link in links if not (document.parent / link).exists()]
    broken += [path for path in paths if not (ROOT / path).exists()]
    assert broken == []


def test_workflows_call_targets_that_make_has() -> None:
    targets = set(re.findall(r"^([\w-]+):", read("Makefile"), re.MULTILINE))
    scripts = [ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml"), ROOT / "README.md"]
    called = {
        name for path in scripts for name in re.findall(r"\bmake ([a-z][a-z-]*)\b", path.read_text(encoding="utf-8"))
    }
    for words in re.findall(r"^(?:nice -n 19 )?make (.+?) </dev/null\b", read(".ci/run"), re.MULTILINE):
        called |= {word for word in words.split() if not re.search(r"^-|=", word)}
    assert {"run", "test-all", "lint", "docs", "wheel", "arm64", "coverage"} <= called
    assert called <= targets


def test_scheduling_and_block_accounting_load_without_torch() -> None:
    modules = "quire, quire.engine.scheduling.scheduler, quire.kv.block_space_manager"
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    result = run_tool("-c", code)
    assert result.stdout.strip() == "False", result.stderr


def test_the_line_budget_counts_code_and_refuses_more(tmp_path: Path) -> None:
    (tmp_path / "src" / "quire").mkdir(parents=True)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "src" / "quire" / "a.py").write_text('"""Doc."""\n\n# why\nx = """\ntext\n"""\ny = 1  # note\n')
    (tmp_path / "csrc" / "a.h").write_text(
        '// doc\n/* more\n   doc */ int x;\n\nconst char* url = "//not a comment";\n'
    )
    for budget, code in ((6, 0), (5, 1)):
        (tmp_path / "pyproject.toml").write_text(f"[tool.quire]\nline_budget = {budget}\n")
        result = run_tool(ROOT / "tools" / "line_budget.py", "--root", tmp_path)
        assert result.returncode == code, result.stdout
        assert f"      6  lines of code, budget {budget}" in result.stdout


def test_an_archive_that_lacks_the_checkpoint_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "quire-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("quire/common/version.py", "")
        archive.writestr("tests/test_x.py", "")
    result = run_tool(ROOT / "tools" / "check_archive.py", wheel)
    assert result.returncode == 1
    assert "lacks quire/models/embedded/quire-tiny/model.safetensors" in result.stdout
    assert "contains tests/test_x.py, which is outside the package" in result.stdout


def test_the_tables_of_the_migration_page_are_those_of_the_code() -> None:
    """If not, run `python -m tools.migration_tables`."""
    assert subprocess.run([sys.executable, "-m", "tools.migration_tables", "--check"], cwd=ROOT).returncode == 0


def test_the_table_of_gguf_architectures_is_that_of_the_code() -> None:
    """If not, run `python -m tools.gguf_table`."""
    assert subprocess.run([sys.executable, "-m", "tools.gguf_table", "--check"], cwd=ROOT).returncode == 0


def test_the_table_of_models_is_that_of_the_registry_and_of_the_tests() -> None:
    """If not, run `python -m tools.models_table`."""
    assert subprocess.run([sys.executable, "-m", "tools.models_table", "--check"], cwd=ROOT).returncode == 0
    rows = [line for line in read("docs/models.md").splitlines() if line.startswith("| `")]
    assert len(rows) == len(MODELS | POOLING_MODELS)
    assert [row for row in rows if row.endswith("|  |")] == [], "an architecture is not tested"

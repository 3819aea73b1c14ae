"""The documentation as a site: links that work in both places, nothing remote, every public name, current tables."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import quire
from tools.check_site import problems
from tools.site_links import page_of, path_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("path", "page"),
    [
        ("README.md", "index.md"),
        ("docs/how-to/memory.md", "how-to/memory.md"),
        ("docs/images/light.png", "images/light.png"),
        ("CONTRIBUTING.md", "CONTRIBUTING.md"),
        ("examples/README.md", "examples/README.md"),
    ],
)
def test_a_page_and_its_path_belong_together(path: str, page: str) -> None:
    assert page_of(path) == page
    assert path_of(page) == path


def test_a_source_file_and_a_folder_get_pages_of_their_own() -> None:
    assert page_of("src/quire/common/errors.py") == "source/src/quire/common/errors.py.md"
    assert page_of("csrc/matmul") == "source/csrc/matmul.md"
    assert path_of("source/csrc/matmul.md") is None, "links in a source file are code"


def test_the_page_of_the_api_has_every_public_name() -> None:
    page = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: quire\.(\w+)$|`quire\.(\w+)`", page, re.MULTILINE))
    assert {first or second for first, second in named} == set(quire.__all__)


@pytest.mark.slow
def test_the_tables_of_memory_are_those_that_quire_plan_computes() -> None:
    """If not, run `python -m tools.memory_table`."""
    assert subprocess.run([sys.executable, "-m", "tools.memory_table", "--check"], cwd=ROOT).returncode == 0


def test_names_in_the_pages_about_the_code_are_in_the_code() -> None:
    files = [path for name in ("src", "csrc", "tests", "tools", "benchmarks") for path in (ROOT / name).rglob("*.*")]
    code = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".h", ".cpp", ".js", ".sh")]
    known = set(re.findall(r"\w+", " ".join([*code, *(str(path) for path in files)])))
    docs = ROOT / "docs"
    for page in (docs / "architecture.md", *docs.glob("adding-*.md"), *docs.glob("packages/*.md")):
        named = re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", page.read_text(encoding="utf-8"))
        assert {word for name in named for word in name.split(".")} - known == set(), page.name


def site(folder: Path, body: str, style: str = "") -> Path:
    (folder / "search").mkdir()
    (folder / "search" / "search_index.json").write_text("{}")
    (folder / "app.js").write_text("")
    (folder / "style.css").write_text(style)
    (folder / "index.html").write_text(body)
    return folder


def test_a_site_may_link_to_others_and_load_its_own_files(tmp_path: Path) -> None:
    body = '<a href="https://example.org">x</a><script src="app.js?v=1"></script>'
    body += '<link rel="stylesheet" href="./style.css">'
    assert list(problems(site(tmp_path, body, "a { background: url(data:image/png;base64,AA) }"))) == []


@pytest.mark.parametrize(
    ("body", "style", "problem"),
    [
        ('<script src="https://cdn.example.org/x.js"></script>', "", "index.html loads https://cdn.example.org/x.js"),
        ('<script src="//cdn.example.org/x.js"></script>', "", "from another server"),
        ('<link rel="preconnect" href="https://fonts.example.org">', "", "https://fonts.example.org from another"),
        ('<img src="gone.png">', "", "index.html loads gone.png, which does not exist"),
        ('<pre class="mermaid"></pre>', "", "index.html has a Mermaid diagram"),
        ("", "@import 'https://example.org/a.css';", "style.css loads https://example.org/a.css"),
        ("", 'a { src: url("https://example.org/a.woff2") }', "style.css loads https://example.org/a.woff2"),
    ],
)
def test_what_a_site_loads_from_elsewhere_is_found(body: str, style: str, problem: str, tmp_path: Path) -> None:
    (found,) = problems(site(tmp_path, body, style))
    assert problem in found


def test_a_site_without_a_search_index_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    assert len(list(problems(tmp_path))) == 1

"""A hook of mkdocs that makes links of the documentation work on the site as they do in the repository.

The pages of `docs` link to files beside them and to files of the repository, such as `../src/quire/common/errors.py` or
`../CONTRIBUTING.md`. The site gets a page for each such file: documents as they are, sources as code, folders as lists.
So the site needs no address of a repository. In `mkdocs.yml`, an entry of the navigation that ends with `/` stands for
all pages of that folder.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
SOURCES = "source/"
_LINK = re.compile(r"(\]\(|<img src=\")(?!\w+:|#|/)([^)#\s\"]+)")
_LANGUAGES = {".py": "python", ".h": "cpp", ".cpp": "cpp", ".toml": "toml", ".sh": "bash", ".js": "javascript"}
_BINARY = {".png", ".svg", ".safetensors"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the folders in the navigation by their pages."""
    if config.nav is not None:
        config.nav = [_without_folders(entry) for entry in config.nav]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page and, one after another, every file of the repository that a page links to."""
    from mkdocs.structure.files import File, InclusionLevel

    waiting = ["README.md", *(path for entry in config.nav or [] for path in _paths(entry))]
    waiting = [path for path in waiting if not (ROOT / DOCS / path).exists() and (ROOT / path).exists()]
    for page in list(files.documentation_pages()):
        waiting += _linked(DOCS + page.src_uri, page.content_string)
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path in seen or path.startswith(DOCS) or not (ROOT / path).exists():
            continue
        seen.add(path)
        content = _content(path)
        in_nav = {DOCS + entry if (ROOT / DOCS / entry).exists() else entry for entry in _paths(config.nav)}
        included = InclusionLevel.UNDEFINED if path in in_nav or path == "README.md" else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, page_of(path), content=content, inclusion=included))
        if path.endswith(".md"):
            waiting += _linked(path, content)
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Direct the page's links to the pages that the site has."""
    here = path_of(page.file.src_uri)
    if here is None:
        return markdown

    def on_site(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match[2]))
        if not (ROOT / target).exists():
            return match[0]  # mkdocs reports it
        return match[1] + posixpath.relpath(page_of(target), posixpath.dirname(page.file.src_uri) or ".")

    return _LINK.sub(on_site, markdown)


def page_of(path: str) -> str:
    """Return the site's source name for a path of the repository."""
    if path == "README.md":
        return "index.md"
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if path.endswith(".md") or PurePosixPath(path).suffix in _BINARY:
        return path
    return f"{SOURCES}{path}.md"


def path_of(page: str) -> str | None:
    """Return the path in the repository of a page of the site; None for a page that shows source."""
    if page == "index.md":
        return "README.md"
    if page.startswith(SOURCES):
        return None
    return DOCS + page if (ROOT / DOCS / page).exists() else page


def _linked(path: str, text: str) -> list[str]:
    """Paths of the repository that the text of `path` links to."""
    folder = posixpath.dirname(path)
    return [posixpath.normpath(posixpath.join(folder, match[2])) for match in _LINK.finditer(text)]


def _content(path: str) -> str:
    file = ROOT / path
    if path.endswith(".md"):
        return file.read_text(encoding="utf-8")
    head = f"---\ntitle: {path}\nsearch: {{exclude: true}}\n---\n\n# `{path}`\n\n"
    if file.is_dir():
        names = sorted(f"{child.name}{'/' * child.is_dir()}" for child in file.iterdir() if child.name[0] not in "._")
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    language = _LANGUAGES.get(file.suffix, "text")
    return f"{head}````` {language}\n{file.read_text(encoding='utf-8')}\n`````\n"


def _without_folders(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return entry
    return {title: _expanded(value) for title, value in entry.items()}


def _expanded(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_folders(entry) for entry in value]
    if isinstance(value, str) and value.endswith("/"):
        return sorted(os.path.join(value, path.name) for path in (ROOT / DOCS / value).glob("*.md"))
    return value


def _paths(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    values = entry.values() if isinstance(entry, dict) else entry
    return [path for value in values for path in _paths(value)]

"""Check that the built documentation works without a network.

    python tools/check_site.py build/site

Every script, style sheet, font, image and frame that a page loads must be a file of the site. Links to other sites are
allowed, because only a reader's click follows them. The exit status is 1 if something is missing or remote.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

_LOADED_LINKS = {"stylesheet", "preload", "modulepreload", "icon", "preconnect", "dns-prefetch", "manifest"}
_URL_IN_CSS = re.compile(r"url\(\s*[\"']?([^\"')]+)|@import\s+[\"']([^\"']+)")


class _Loaded(HTMLParser):
    """Collects the addresses that a browser loads by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "link" and _LOADED_LINKS & set(values.get("rel", "").split()):
            self.found.append(values.get("href", ""))
        if tag in {"script", "img", "iframe", "source", "video", "audio", "embed"} and "src" in values:
            self.found.append(values["src"])
        if tag == "object" and "data" in values:
            self.found.append(values["data"])


def problems(site: Path) -> Iterator[str]:
    """What a browser would load from elsewhere, or not find."""
    pages = sorted([*site.rglob("*.html"), *site.rglob("*.css")])
    if not (site / "index.html").is_file():
        yield f"{site} has no index.html"
    if not (site / "search" / "search_index.json").is_file():
        yield f"{site} has no search index"
    for page in pages:
        text = page.read_text(encoding="utf-8")
        if 'class="mermaid"' in text:
            yield f"{page.relative_to(site)} has a Mermaid diagram: its script would come from another server"
        for address in _addresses(page, text):
            parts = urlsplit(address)
            if parts.scheme == "data" or not (parts.scheme or parts.netloc or parts.path):
                continue
            name = page.relative_to(site)
            if parts.scheme or parts.netloc:
                yield f"{name} loads {address} from another server"
            elif not _target(site, page, unquote(parts.path)).exists():
                yield f"{name} loads {address}, which does not exist"


def _addresses(page: Path, text: str) -> list[str]:
    if page.suffix == ".css":
        return [first or second for first, second in _URL_IN_CSS.findall(text)]
    parser = _Loaded()
    parser.feed(text)
    return parser.found


def _target(site: Path, page: Path, path: str) -> Path:
    return site / path.lstrip("/") if path.startswith("/") else page.parent / path


def main() -> int:
    """Print what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("site", type=Path)
    found = list(problems(parser.parse_args().site))
    print(*found, sep="\n", end="\n" * bool(found))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())

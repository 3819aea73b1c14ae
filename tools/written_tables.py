"""Tables of the docs that a program writes, between two comments of a page."""

import argparse
from collections.abc import Iterable
from pathlib import Path

_END = "<!-- end -->"


def write_or_check(doc: str | None, page: Path, tool: str, lines: Iterable[str]) -> int:
    """Run a tool's command line: write the lines between `tool`'s comment and the end mark of `page`. With --check
    nothing is written, and the status that is returned is 1 if the page differs."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    only_checks = parser.parse_args().check
    text, begin = page.read_text(encoding="utf-8"), f"<!-- written by {tool} -->"
    head, _, rest = text.partition(begin)
    written = f"{head}{begin}\n{chr(10).join(lines)}\n{_END}{rest.partition(_END)[2]}"
    if only_checks:
        return int(written != text)
    page.write_text(written, encoding="utf-8")
    return 0

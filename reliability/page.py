"""Writes the last full result of each program of this package into docs/reliability.md."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"


def record(section: str, command: str, lines: Iterable[str], page: Path = PAGE) -> None:
    """Replace the text between the section's marks. Raises ValueError if the page has no such section."""
    begin, end = f"<!-- {section}: written by the command -->", f"<!-- end of {section} -->"
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{page} has no section {section!r} between its marks")
    head = f"`{command}`, {time.strftime('%Y-%m-%d')}, {platform.machine()}, Python {platform.python_version()}:"
    body = "\n".join([begin, "", head, "", *lines, "", end])
    written = re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: body, text, flags=re.DOTALL)
    partial = page.with_name(page.name + ".tmp")
    partial.write_text(written, encoding="utf-8")
    partial.replace(page)


def table(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """Format rows with equal keys as a Markdown table."""
    listed = list(rows)
    if not listed:
        return []
    head = list(listed[0])
    return [
        f"| {' | '.join(head)} |",
        "|" + "---|" * len(head),
        *(f"| {' | '.join(str(row[name]) for name in head)} |" for row in listed),
    ]


def recorded_rows(section: str, page: Path = PAGE) -> list[dict[str, str]]:
    """The rows of a section's table, as `table` formats them."""
    text = page.read_text(encoding="utf-8").partition(f"<!-- {section}: written")[2].partition("<!-- end of")[0]
    lines = [line.split(" | ") for line in re.findall(r"^\| (.*) \|$", text, re.MULTILINE)]
    return [dict(zip(lines[0], cells, strict=True)) for cells in lines[1:]]

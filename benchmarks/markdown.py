"""Parts of the report as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def title(text: str, *commands: str) -> Iterator[str]:
    """Yield a section's title, and the commands that measured it."""
    yield f"## {text}\n\nMeasured by {' and '.join(f'`{command}`' for command in commands)}.\n"


def table(head: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"

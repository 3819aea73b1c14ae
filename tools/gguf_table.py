"""Write the table of docs/gguf.md: each architecture of GGUF files, the class that runs it, and what is undone.

    python -m tools.gguf_table [--check]

The table comes from the code. With --check nothing is written, and the exit status is 1 if the page differs.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

from quire.config.checkpoint.gguf.architectures import Architecture
from quire.config.checkpoint.gguf.table import ARCHITECTURES
from tools.written_tables import write_or_check

PAGE = Path(__file__).resolve().parents[1] / "docs" / "gguf.md"


def table() -> Iterator[str]:
    """The lines of the table."""
    yield from ("| `general.architecture` | class | what is undone |", "|---|---|---|")
    for name, row in sorted(ARCHITECTURES.items()):
        classes = dict.fromkeys(each for each in (row.name, row.windowed, row.mixture) if each is not None)
        yield f"| `{name}` | {', '.join(f'`{each}`' for each in classes)} | {', '.join(_undone(row)) or '-'} |"


def _undone(row: Architecture) -> Iterator[str]:
    if row.pairs:
        yield "rows of queries and keys in pairs"
    if row.is_grouped:
        yield "rows of queries, keys and values apart"
    if row.norm_offset:
        yield f"norms plus {row.norm_offset:g}"
    if row.constants.get("transposed_matrices") is False:
        yield "nothing: matrices stay [out, in]"


if __name__ == "__main__":
    sys.exit(write_or_check(__doc__, PAGE, "tools/gguf_table.py", table()))

"""The tables of items and blocks against the types that are read."""

import re
from pathlib import Path

from quire.server.api.messages.protocol import Block
from quire.server.api.responses.protocol import InputItem

DOCS = Path(__file__).parents[2] / "docs"


def first_column(document: str, heading: str) -> list[str]:
    section = (DOCS / document).read_text(encoding="utf-8").split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_every_item_and_block_has_its_row() -> None:
    kinds = InputItem.__annotations__["type"].__args__
    assert sorted(first_column("responses.md", "Items")) == sorted(kinds)
    tags = [block.__struct_config__.tag for block in Block.__args__]
    assert sorted(first_column("messages.md", "Blocks")) == sorted(tags)

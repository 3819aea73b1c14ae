"""The blocks of docs/clients.md, as they stand there."""

import re
from pathlib import Path

import pytest

from tests.clients.served import KEY, Served

TEXT = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"## ([^\n]+)\n\n```python\n(.*?)```", TEXT, re.DOTALL))


def test_all_blocks_are_found() -> None:
    assert len(BLOCKS) == TEXT.count("```python") == 3


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs_as_it_stands(name: str, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code = BLOCKS[name].replace("http://127.0.0.1:8000", served.url).replace('"none"', repr(KEY))
    exec(compile(code, "docs/clients.md", "exec"), {"__name__": name})
    assert capsys.readouterr().out.strip()

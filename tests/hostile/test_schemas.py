"""Very many different structures: neither memory nor disk grows with their number."""

import json
from pathlib import Path

import pytest

from tests.hostile.target import COMPLETIONS, Target


def written_bytes(target: Target) -> int:
    """By all its processes, the log left out."""
    fields = [Path(f"/proc/{pid}/io").read_text().split() for pid in target.pids()]
    return sum(int(each[each.index("write_bytes:") + 1]) for each in fields) - target.log.stat().st_size


@pytest.mark.parametrize("num", [150, pytest.param(10_000, marks=pytest.mark.thorough)])
def test_distinct_schemas(guarded_server: Target, num: int):
    """Of each kind in turn, each of them new."""
    target = guarded_server
    kinds = (
        lambda i: {
            "guided_json": {"type": "object", "properties": {f"p{i}": {"enum": [i, f"v{i}"]}}, "required": [f"p{i}"]}
        },
        lambda i: {"guided_regex": f"[a-z]{{{i % 50 + 1}}}x{i}"},
        lambda i: {"guided_choice": [f"choice {i}", f"other {i}"]},
        lambda i: {"guided_grammar": f'root ::= "a{i}" | "b" root'},
    )
    with target.unharmed(f"{num} distinct schemas", growth_mb=64):
        before = written_bytes(target)
        for i in range(num):
            body = {"prompt": "Hi", "max_tokens": 1} | kinds[i % len(kinds)](num + i)
            assert target.post(COMPLETIONS, json.dumps(body).encode()).status == 200, body
        assert written_bytes(target) - before < 2**20

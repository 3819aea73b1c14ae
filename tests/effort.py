"""How much of the tests runs: which of them `make test` leaves out, and how many examples hypothesis tries."""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

CLIENTS = Path(__file__).parent / "clients"
_MOST, _ALL, _QUICK, _LEAST = 400, 50, 25, 10
_MANY, _SHARE = 6, 4
"""Of a test with more than _MANY cases, one in _SHARE runs, but not fewer than _MANY, where all tests are run."""


def mark_slow(items: Sequence[pytest.Item], *, are_all: bool = False) -> None:
    """Mark as slow the tests with clients, all cases but one in n of each test marked `sampled(n)`, and, if these
    `are_all` tests instead of chosen ones, most of the cases of a test that has many and is not `essential`."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if CLIENTS in item.path.parents:
            item.add_marker("slow")
        if item.get_closest_marker("thorough"):
            continue
        if are_all or item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        # By a hash of the name, so that each value of every parameter has its chance, and the choice never changes.
        group.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        marker = group[0].get_closest_marker("sampled")
        num_left = len(group) if marker is None else math.ceil(len(group) / marker.args[0])
        if are_all and num_left > _MANY and group[0].get_closest_marker("essential") is None:
            num_left = min(num_left, max(_MANY, math.ceil(len(group) / _SHARE)))
        for item in group[num_left:]:
            item.add_marker("slow")


def register_profiles(*, derandomize: bool) -> None:
    """The profiles `least`, `quick`, `all` and `most`, for `--hypothesis-profile`. A check of a change has those of
    `all`, which never change; `most` is for a search by hand. How long an example takes says more about what else the
    machine does than about the test, so none has a time limit."""
    for name, max_examples in {"least": _LEAST // 2, "quick": _QUICK, "all": _ALL, "most": _MOST}.items():
        settings.register_profile(
            name,
            max_examples=max_examples,
            derandomize=derandomize,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        )


def examples(num: int) -> int:
    """`num` where another test has 100 examples; in each profile its share of them, but not fewer than ten where there
    are as many."""
    return max(min(num, _LEAST), num * settings.default.max_examples // 100)

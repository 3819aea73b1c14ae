"""Which tests run where: CONTRIBUTING.md has the table."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

from reliability.coverage import TESTS, is_measured
from tests.effort import CLIENTS, examples, mark_slow
from tools.emulate_arm64 import emulator_arguments

ROOT = Path(__file__).parents[1]


class Item:
    """As much of a pytest.Item as is needed here."""

    def __init__(self, nodeid: str, *markers: pytest.Mark) -> None:
        self.nodeid = nodeid
        self.path = ROOT / nodeid.partition("::")[0]
        self.markers = {marker.name: marker for marker in markers}

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.markers.get(name)

    def add_marker(self, name: str) -> None:
        self.markers[name] = getattr(pytest.mark, name).mark


def left(items: list[Any], *, are_all: bool = False) -> list[str]:
    mark_slow(items, are_all=are_all)
    return [item.nodeid for item in items if "slow" not in item.markers]


def test_of_a_sampled_test_one_case_in_n_is_left_and_always_the_same() -> None:
    def items() -> list[Any]:
        return [Item(f"tests/a.py::test[{case}]", pytest.mark.sampled(3).mark) for case in range(10)]

    chosen = left(items())
    assert len(chosen) == 4
    assert chosen == left(items())
    assert sorted(chosen) == sorted(left(items()[::-1])), "the order of collection does not matter"
    assert chosen != [f"tests/a.py::test[{case}]" for case in (0, 3, 6, 9)]


def test_each_sampled_test_keeps_a_case() -> None:
    marker = pytest.mark.sampled(8).mark
    items: list[Any] = [Item("tests/a.py::one[x]", marker), Item("tests/a.py::other[x]", marker)]
    assert left(items) == ["tests/a.py::one[x]", "tests/a.py::other[x]"]


@pytest.mark.parametrize(("num_cases", "num_left"), [(1, 1), (6, 6), (7, 6), (24, 6), (25, 7), (400, 100)])
def test_of_many_cases_a_quarter_is_left_where_all_tests_run(num_cases: int, num_left: int) -> None:
    def items() -> list[Any]:
        return [Item(f"tests/a.py::test[{case}]") for case in range(num_cases)]

    assert len(left(items(), are_all=True)) == num_left
    assert len(left(items())) == num_cases


def test_sampled_tests_of_few_cases_and_essential_ones_keep_theirs() -> None:
    for marker, num_left in (pytest.mark.sampled(3).mark, 4), (pytest.mark.essential.mark, 12):
        assert len(left([Item(f"tests/a.py::test[{case}]", marker) for case in range(12)], are_all=True)) == num_left


def test_all_cases_run_on_emulated_processors_if_asked_for() -> None:
    assert "tests/kernels" in emulator_arguments(["--all"]), "where no test is named, three of four are left out"
    named = "tests/kernels/test_lora.py"
    assert emulator_arguments(["--all", named])[-2:] == ["--share=1", named]
    assert "tests/kernels" not in emulator_arguments([])


def test_tests_with_clients_are_slow_and_others_are_not() -> None:
    client = f"{CLIENTS.relative_to(ROOT)}/test_openai.py::test"
    assert left([Item(client), Item("tests/kv/test_windows.py::test")]) == ["tests/kv/test_windows.py::test"]


@pytest.mark.parametrize(
    ("most", "profile", "num"),
    [(300, "most", 1200), (300, "all", 150), (300, "quick", 75), (20, "quick", 10), (3, "quick", 3)],
)
def test_a_quarter_of_the_examples_and_not_too_few(most: int, profile: str, num: int) -> None:
    before = settings.get_current_profile_name()
    settings.load_profile(profile)
    try:
        assert examples(most) == num
    finally:
        settings.load_profile(before)


def test_every_essential_test_is_found_by_make_check() -> None:
    """It looks for the marker's name in files whose names begin with `test_`."""
    marked = [path for path in (ROOT / "tests").rglob("*.py") if "mark.essential" in path.read_text(encoding="utf-8")]
    assert len(marked) > 20
    assert all(path.name.startswith("test_") for path in marked)


def test_what_coverage_measures_exists() -> None:
    paths = [name.partition("::")[0] for name in TESTS]
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("tests/kv/test_windows.py::test_a", True),
        ("tests/kv_more/test_windows.py::test_a", False),
        ("tests/kv/test_block_manager_stateful.py::TestBlockManager::runTest", False),
        ("tests/grammar/test_refused.py::test_refused_when_made[a]", True),
        ("tests/grammar/test_refused.py::test_refused_when_made_twice", False),
        ("tests/clients/test_openai.py::test_a", False),
    ],
)
def test_only_chosen_tests_are_measured(test: str, expected: bool) -> None:
    assert is_measured(test) == expected


def test_a_test_process_has_one_thread_of_torch() -> None:
    """A second one would spin on a core that another process could use."""
    assert torch.get_num_threads() == int(os.environ["OMP_NUM_THREADS"])

"""Which CPUs the kernels' threads are pinned to, as users write it."""

import os

import pytest

from quire.common.errors import ConfigError
from quire.config.args import EngineArgs
from quire.config.parallel import ParallelConfig, check_threads, parse_cpu_list


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", {0: {0, 1, 2, 3, 8}}.__getitem__, raising=False)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0,2-3", (0, 2, 3)), ("8, 1-1,0", (8, 1, 0)), ("0-3,8", (0, 1, 2, 3, 8))]
)
def test_numbers_and_ranges_are_read_in_the_order_given(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpu_list(text) == cpus
    assert EngineArgs(cpu_list=text).resolve().parallel == ParallelConfig(None, cpus=cpus)


def test_any_cpu_is_none_to_which_a_thread_is_pinned() -> None:
    parallel = EngineArgs(cpu_list="any", num_threads=2).resolve().parallel
    assert parallel == ParallelConfig(2, pins_ranks=False)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(
            (text, "write CPU numbers and ranges, as in 0,2-3")
            for text in ("", "a", "1-0", "0,", "-1", "0-1-2", "0--1")
        ),
        ("0-99999999999", r"CPU 4 is not available to this process; allowed: \[0, 1, 2, 3, 8\]"),
        ("0,1-2,2", "CPU 2 is listed twice"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"cpu_list='{text}': {message}"):
        parse_cpu_list(text)


def test_where_threads_cannot_be_pinned_no_cpu_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ConfigError, match=r"CPU 0 .* allowed: \[\]"):
        parse_cpu_list("0")


def test_the_number_of_threads_is_said_once() -> None:
    with pytest.raises(ConfigError, match="num_threads and cpu_list both"):
        EngineArgs(cpu_list="0", num_threads=1).resolve()


@pytest.mark.parametrize(("count", "cpus"), [(2, [0]), (1, [-1]), (2, [0, 10**9])])
def test_threads_are_pinned_to_cpus_that_there_are(count: int, cpus: list[int]) -> None:
    with pytest.raises(ConfigError, match=rf"must be {count} of the CPUs that this process may use, \["):
        check_threads(count, cpus)

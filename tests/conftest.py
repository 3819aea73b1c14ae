"""What every test may rely on, and which tests run when.

`make check` runs the tests marked `essential`, `make test` all but those marked `slow`, `make test-all` these too. The
marker `sampled(n)` makes all but one in n of a test's cases slow. So are three of four cases of a test with many of
them, unless a file or a folder is named: `pytest tests/kv` runs all cases of its tests. Tests with real clients are
slow as a folder: their libraries take seconds to import, so where they do not run, their files are not even loaded.
"""

import gc
import math
import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

from quire.engine.drafting import drafting
from quire.runner import model_runner
from tests import embedded, forks
from tests.effort import CLIENTS, mark_slow, register_profiles

register_profiles(derandomize="CI" in os.environ)  # a check of a change tells of the change, not of luck
settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not load the tests with clients where slow tests are left out."""
    is_left_out = collection_path == CLIENTS and "not slow" in config.option.markexpr
    return True if is_left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is slow before pytest selects by markers."""
    mark_slow(items, are_all=not config.option.file_or_dir)


model_runner._RECORDED_WORK = 0  # steps of the tests' small models are recorded, as those of larger models are
gc.disable()  # while tests are collected, when nothing of a million objects becomes garbage


def pytest_collection_finish() -> None:
    """Exempt all that the collected tests consist of from garbage collection: it lives to the end, and looking at a
    million objects takes half a second in each full collection. New objects are looked at more rarely than else, which
    took a thirtieth of the tests' time; engines that are in cycles still go within seconds."""
    gc.freeze()
    gc.set_threshold(5000, 10, 10)
    gc.enable()


def pytest_unconfigure() -> None:
    """The same at the end, when the interpreter would look at all objects three more times."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def embedded_checkpoints():
    """An engine of an embedded checkpoint is made in a fraction of the time."""
    with embedded.kept():
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_engines():
    """An engine process is there in a tenth of the time that importing torch takes."""
    with forks.running():
        yield


@pytest.fixture(scope="session", autouse=True)
def steps_of_any_length_take_no_drafts_unasked():
    """How many steps a request takes would else depend on how long they take. Tests of drafts name a method."""
    before, drafting.SHORTEST_STEP_S = drafting.SHORTEST_STEP_S, math.inf
    yield
    drafting.SHORTEST_STEP_S = before


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background and the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

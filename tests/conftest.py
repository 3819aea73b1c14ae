"""What every test may rely on, and which tests run when.

`make check` runs the tests marked `essential`, `make test` all but those marked `slow`, `make test-all` these too. The
marker `sampled(n)` makes all but one in n of a test's cases slow. Tests with real clients are slow as a folder: their
libraries take seconds to import, so where they do not run, their files are not even loaded.
"""

import os
import signal
import zlib
from pathlib import Path

import pytest
from hypothesis import settings

from tests.effort import register_profiles

CLIENTS = Path(__file__).parent / "clients"

# Two test processes share two cores: a second thread of torch's in each would only wait for the other's.
os.environ.setdefault("OMP_NUM_THREADS", "1")

register_profiles(derandomize="CI" in os.environ)  # a check of a change tells of the change, not of luck
settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not load the tests with clients where slow tests are left out."""
    is_left_out = collection_path == CLIENTS and "not slow" in config.option.markexpr
    return True if is_left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is slow by its folder or as a case of a sampled test, before pytest selects by markers."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if CLIENTS in item.path.parents:
            item.add_marker("slow")
        if item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in cases.values():
        # By a hash of the name, so that each value of every parameter has its chance, and the choice never changes.
        group.sort(key=lambda item: zlib.crc32(item.nodeid.encode()))
        marker = group[0].get_closest_marker("sampled")
        assert marker is not None
        for item in group[-(-len(group) // marker.args[0]) :]:
            item.add_marker("slow")


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background and the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

"""Free memory goes back to the system."""

from pathlib import Path

import pytest

from quire.common import memory


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.skipif(memory._trim is None, reason="an allocator that is not glibc's")
def test_what_is_free_below_something_in_use_is_given_back() -> None:
    memory.give_back_memory()
    pieces = [bytes([i % 256]) * 60_000 for i in range(2000)]
    del pieces[:-1]
    before_mb = resident_mb()
    memory.give_back_memory()
    assert resident_mb() < before_mb - 80
    assert len(pieces[0]) == 60_000


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr(memory, "_trim", memory._find_trim())
    assert memory._trim is None
    memory.give_back_memory()

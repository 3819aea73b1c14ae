"""Free memory goes back to the system."""

import gc
import sys
import weakref
from collections.abc import Iterator
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


@pytest.fixture
def collecting() -> Iterator[None]:
    """The search for garbage is on, as in programs of users; most tests run without it."""
    was = gc.isenabled()
    gc.enable()
    yield
    if not was:
        gc.disable()


class Node:
    """Part of a cycle."""

    def __init__(self) -> None:
        self.me = self


@pytest.mark.usefixtures("collecting")
def test_the_search_for_garbage_pauses_during_imports_and_goes_on_after_an_error() -> None:
    was_on = []

    def failing_import() -> None:
        with memory.collection_paused():
            was_on.append(gc.isenabled())
            raise ImportError

    with pytest.raises(ImportError):
        failing_import()
    assert was_on == [False]
    assert gc.isenabled()


@pytest.mark.usefixtures("collecting")
def test_what_was_imported_becomes_old_at_once_and_garbage_is_still_found() -> None:
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    with memory.collection_paused():
        node = Node()
    assert not any(kept is node for kept in gc.get_objects(generation=0))
    assert any(kept is node for kept in gc.get_objects(generation=2))
    gone = weakref.ref(node)
    del node
    gc.collect()
    assert gone() is None
    if frozen:
        gc.freeze()


@pytest.mark.usefixtures("collecting")
def test_what_a_program_froze_stays_frozen() -> None:
    was_frozen = gc.get_freeze_count()
    node = Node()
    gc.freeze()
    with memory.collection_paused():
        pass
    # The number of frozen objects tells nothing: some that other tests left may go meanwhile.
    assert not any(kept is node for kept in gc.get_objects())
    if not was_frozen:
        gc.unfreeze()
        assert any(kept is node for kept in gc.get_objects())


def test_where_the_search_is_off_it_stays_off() -> None:
    was = gc.isenabled()
    gc.disable()
    with memory.collection_paused():
        assert not gc.isenabled()
    assert not gc.isenabled()
    if was:
        gc.enable()


@pytest.mark.usefixtures("collecting")
def test_names_are_imported_while_the_search_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    import quire

    seen = []
    monkeypatch.delitem(vars(quire), "SamplingParams", raising=False)
    monkeypatch.setattr("importlib.import_module", lambda name: seen.append(gc.isenabled()) or sys.modules[name])
    assert quire.SamplingParams is sys.modules["quire.common.params"].SamplingParams
    assert seen == [False]

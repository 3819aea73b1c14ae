"""What is kept of responses: bounded, apart by owner, whole after a crash."""

import asyncio
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from quire.common.errors import ConfigError
from quire.common.faults import Fault, inject
from quire.server.api.responses.store import (
    MAX_CHAIN,
    ChainTooLongError,
    ResponseStore,
    ResponseTooLargeError,
    StoredResponse,
    StoreError,
)

Open = Callable[..., ResponseStore]


def fail(response: bytes, reason: str) -> bytes:
    return response + b" failed: " + reason.encode()


@pytest.fixture
def open_store() -> Iterator[Open]:
    stores = []

    def opened(path: Path | None = None, max_responses: int = 100, max_bytes: int = 100_000) -> ResponseStore:
        stores.append(ResponseStore(path, max_responses=max_responses, max_bytes=max_bytes, fail=fail))
        return stores[-1]

    yield opened
    for store in stores:
        store.close()


def row(key: str, previous: str | None = None, *, running: bool = False, size: int = 10) -> StoredResponse:
    return StoredResponse(key, previous, running, b"x" * size, b"[]")


def keys(store: ResponseStore, *names: str, owner: str = "a") -> list[str]:
    return [name for name in names if asyncio.run(store.get(owner, name)) is not None]


def test_a_response_comes_back_as_it_was_until_it_is_deleted(open_store: Open) -> None:
    store = open_store()
    new = StoredResponse("one", "zero", True, b'{"a":1}', b"[1]")
    asyncio.run(store.add("a", new))
    assert asyncio.run(store.get("a", "one")) == new
    asyncio.run(store.update("a", StoredResponse("one", "zero", False, b"{}", b"[1]")))
    found = asyncio.run(store.get("a", "one"))
    assert found == StoredResponse("one", "zero", False, b"{}", b"[1]")
    assert asyncio.run(store.delete("a", "one"))
    assert not asyncio.run(store.delete("a", "one"))
    assert keys(store, "one") == []


def test_an_update_after_a_deletion_brings_nothing_back(open_store: Open) -> None:
    store = open_store()
    asyncio.run(store.add("a", row("one", running=True)))
    asyncio.run(store.delete("a", "one"))
    asyncio.run(store.update("a", row("one")))
    assert keys(store, "one") == []


def test_another_owner_neither_sees_nor_changes_it(open_store: Open) -> None:
    store = open_store()
    asyncio.run(store.add("a", row("one")))
    assert keys(store, "one", owner="b") == []
    assert not asyncio.run(store.delete("b", "one"))
    asyncio.run(store.update("b", row("one", size=1)))
    with pytest.raises(KeyError):
        asyncio.run(store.chain("b", "one", 1000))
    with pytest.raises(StoreError):
        asyncio.run(store.add("b", row("one")))
    assert asyncio.run(store.get("a", "one")) == row("one")


def test_what_looks_like_sql_is_a_text(open_store: Open) -> None:
    store = open_store()
    asyncio.run(store.add("a", row("one")))
    assert asyncio.run(store.get("a' OR '1'='1", "one")) is None
    assert asyncio.run(store.get("a", "one' --")) is None
    assert not asyncio.run(store.delete("a", "'; DROP TABLE responses; --"))
    assert keys(store, "one") == ["one"]


def test_the_oldest_go_first_when_there_are_too_many(open_store: Open) -> None:
    store = open_store(max_responses=3)
    for name in "abcde":
        asyncio.run(store.add("a", row(name)))
    assert keys(store, *"abcde") == ["c", "d", "e"]


def test_the_oldest_go_first_when_they_have_too_many_bytes(open_store: Open) -> None:
    store = open_store(max_bytes=100)
    for name in "abc":
        asyncio.run(store.add("a", row(name, size=28)))
    assert keys(store, *"abc") == ["a", "b", "c"]
    asyncio.run(store.update("a", row("a", size=60)))  # the one that is written stays, though it is the oldest
    assert keys(store, *"abc") == ["a", "c"]
    asyncio.run(store.add("b", row("d", size=98)))
    assert keys(store, *"abc") == []
    assert keys(store, "d", owner="b") == ["d"]


def test_one_that_is_larger_than_the_store_is_refused_and_nothing_goes(open_store: Open) -> None:
    store = open_store(max_bytes=100)
    asyncio.run(store.add("a", row("small")))
    with pytest.raises(ResponseTooLargeError, match="101 bytes"):
        asyncio.run(store.add("a", row("large", size=99)))
    with pytest.raises(ResponseTooLargeError):
        asyncio.run(store.update("a", row("small", size=99)))
    assert asyncio.run(store.get("a", "small")) == row("small")
    assert keys(store, "large") == []


def test_a_chain_begins_with_the_first(open_store: Open) -> None:
    store = open_store()
    for name, previous in (("a", None), ("b", "a"), ("other", "a"), ("c", "b")):
        asyncio.run(store.add("a", row(name, previous)))
    assert [link.id for link in asyncio.run(store.chain("a", "c", 1000))] == ["a", "b", "c"]


def test_a_chain_with_a_gap_names_what_is_missing(open_store: Open) -> None:
    store = open_store()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        asyncio.run(store.add("a", row(name, previous)))
    asyncio.run(store.delete("a", "a"))
    with pytest.raises(KeyError, match="'a'"):
        asyncio.run(store.chain("a", "c", 1000))


def test_a_chain_is_bounded_in_number_and_bytes(open_store: Open) -> None:
    store = open_store(max_responses=2 * MAX_CHAIN)

    async def grow() -> None:
        for i in range(MAX_CHAIN + 1):
            await store.add("a", row(f"r{i}", f"r{i - 1}" if i else None))

    asyncio.run(grow())
    assert len(asyncio.run(store.chain("a", f"r{MAX_CHAIN - 1}", 12 * MAX_CHAIN))) == MAX_CHAIN
    with pytest.raises(ChainTooLongError):
        asyncio.run(store.chain("a", f"r{MAX_CHAIN - 1}", 12 * MAX_CHAIN - 1))
    with pytest.raises(ChainTooLongError):
        asyncio.run(store.chain("a", f"r{MAX_CHAIN}", 10**6))


def test_a_chain_that_bites_its_tail_ends(open_store: Open) -> None:
    store = open_store()
    asyncio.run(store.add("a", row("a", "b")))
    asyncio.run(store.add("a", row("b", "a")))
    with pytest.raises(ChainTooLongError):
        asyncio.run(store.chain("a", "a", 10**6))


def test_the_file_survives_a_restart_and_is_readable_by_its_owner_only(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, max_responses=100, max_bytes=1000, fail=fail)
    asyncio.run(store.add("a", row("done")))
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o600}
    store.close()
    assert keys(open_store(path), "done") == ["done"]


def test_after_a_crash_what_ran_has_failed_and_the_rest_is_whole(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "responses.db"
    store = open_store(path)
    asyncio.run(store.add("a", row("done")))
    asyncio.run(store.add("a", row("running", running=True)))
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for part in tmp_path.glob("responses.db*"):  # what a power cut would leave: the file and its log
        shutil.copy(part, crashed)
    after = open_store(crashed / "responses.db")
    found = asyncio.run(after.get("a", "running"))
    assert found is not None
    assert not found.running
    assert found.response == b"x" * 10 + b" failed: the server was restarted"
    assert asyncio.run(after.get("a", "done")) == row("done")


def test_a_log_that_was_cut_off_loses_the_last_change_only(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "responses.db"
    store = open_store(path)
    asyncio.run(store.add("a", row("first", size=5000)))
    log = tmp_path / "responses.db-wal"
    before = log.stat().st_size
    asyncio.run(store.add("a", row("second", size=5000)))
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    shutil.copy(path, crashed)
    (crashed / log.name).write_bytes(log.read_bytes()[: (before + log.stat().st_size) // 2])
    assert keys(open_store(crashed / "responses.db"), "first", "second") == ["first"]


def test_one_server_at_a_time(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "responses.db"
    open_store(path)
    with pytest.raises(ConfigError, match="in use by another server"):
        open_store(path)


def test_a_file_that_is_not_ours_is_refused_and_stays_as_it_is(tmp_path: Path, open_store: Open) -> None:
    text, foreign, newer = tmp_path / "text", tmp_path / "foreign", tmp_path / "newer"
    text.write_text("dear diary, " * 100)
    with sqlite3.connect(foreign) as connection:
        connection.execute("CREATE TABLE t (x)")
    connection.close()
    ResponseStore(newer, max_responses=1, max_bytes=1, fail=fail).close()
    with sqlite3.connect(newer) as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    for path, reason in ((text, "not a database"), (foreign, "another program"), (newer, "version 99")):
        before = path.read_bytes()
        with pytest.raises(ConfigError, match=reason):
            open_store(path)
        assert path.read_bytes() == before


def test_a_damaged_file_is_refused(tmp_path: Path, open_store: Open) -> None:
    path = tmp_path / "responses.db"
    store = ResponseStore(path, max_responses=100, max_bytes=10**6, fail=fail)
    for i in range(20):
        asyncio.run(store.add("a", row(f"r{i}", size=3000)))
    store.close()
    raw = bytearray(path.read_bytes())
    raw[4096 : len(raw) - 4096] = bytes(len(raw) - 8192)
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match="damaged"):
        open_store(path)


@pytest.mark.parametrize("response", [b'{"a": "\xd0 "}', b"{", 5])
def test_a_row_that_is_damaged_is_refused(tmp_path: Path, response: object) -> None:
    """SQLite keeps no check of what a row holds."""
    path = tmp_path / "responses.db"
    store = ResponseStore(path, max_responses=9, max_bytes=10**6, fail=fail)
    asyncio.run(store.add("a", row("one", running=True)))
    store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE responses SET response = ?", (response,))
    connection.close()
    with pytest.raises(ConfigError, match="damaged"):
        ResponseStore(path, max_responses=9, max_bytes=10**6, fail=lambda old, _: msgspec.json.decode(old))


@pytest.mark.parametrize("name", ["no/such/folder/x.db", "."])
def test_a_path_that_cannot_be_opened_is_refused(tmp_path: Path, open_store: Open, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be opened"):
        open_store(tmp_path / name)


def test_a_full_disk_is_reported_and_nothing_is_partly_written(tmp_path: Path, open_store: Open) -> None:
    store = open_store(tmp_path / "responses.db", max_bytes=10**7)
    asyncio.run(store.add("a", row("before", running=True)))
    limit_pages(store, 12)
    with pytest.raises(StoreError, match="the disk is full"):
        asyncio.run(store.add("a", row("large", size=10**6)))
    with pytest.raises(StoreError, match="the disk is full"):
        asyncio.run(store.update("a", row("before", size=10**6)))
    limit_pages(store, 10**6)
    assert asyncio.run(store.get("a", "before")) == row("before", running=True)
    assert keys(store, "large") == []
    asyncio.run(store.add("a", row("large", size=10**6)))


def limit_pages(store: ResponseStore, number: int) -> None:
    """SQLite answers the same when it may have no more pages as when the disk has none."""
    store._thread.submit(store._connection.execute, f"PRAGMA max_page_count = {number}").result()


def test_calls_at_once_are_all_carried_out(open_store: Open) -> None:
    store = open_store(max_responses=50)

    async def many() -> None:
        await asyncio.gather(*(store.add("a", row(f"r{i}")) for i in range(200)))

    asyncio.run(many())
    assert len(keys(store, *(f"r{i}" for i in range(200)))) == 50


def test_a_request_that_is_cancelled_leaves_no_open_transaction(open_store: Open) -> None:
    store = open_store()

    async def cancelled() -> None:
        task = asyncio.create_task(store.add("a", row("one")))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await store.add("a", row("two"))

    asyncio.run(cancelled())
    assert keys(store, "one", "two") == ["one", "two"]


def test_a_full_disk_is_not_taken_for_damage(tmp_path: Path, open_store: Open) -> None:
    with inject(Fault("store.write", error="ENOSPC")), pytest.raises(ConfigError, match=r"db: the disk is full$"):
        open_store(tmp_path / "responses.db")
    store = open_store()
    with inject(Fault("store.write", error="ENOSPC")), pytest.raises(StoreError, match="the disk is full"):
        asyncio.run(store.add("a", row("one")))
    assert keys(store, "one") == []

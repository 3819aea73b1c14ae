"""Storage of responses for later requests: an SQLite file, which survives a restart, or memory.

A response belongs to the API key (`owner`) that made it, and other keys cannot find it. The number and the size of
responses are limited; the oldest ones are deleted first. Every change is one transaction, so that a crash leaves no
partly written row. Only one server at a time can use the file.
"""

import asyncio
import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import msgspec

from quire.common.errors import ConfigError, QuireError
from quire.common.faults import fault_point

P = ParamSpec("P")
T = TypeVar("T")

APPLICATION_ID = 0x51554952
"""Marks a database as Quire's: `QUIR`."""
SCHEMA_VERSION = 1
MAX_CHAIN = 1000
"""Maximum number of responses in a chain."""

_SCHEMA = (
    "CREATE TABLE responses (id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous_id TEXT, running INTEGER NOT NULL, "
    "response BLOB NOT NULL, input_items BLOB NOT NULL, num_bytes INTEGER NOT NULL)",
    "CREATE INDEX sizes ON responses (num_bytes)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_INSERT = "INSERT INTO responses VALUES (:id, :owner, :previous_id, :running, :response, :input_items, :num_bytes)"
_UPDATE = (
    "UPDATE responses SET running = :running, response = :response, num_bytes = :num_bytes "
    "WHERE id = :id AND owner = :owner"
)
_CHAIN = """
WITH RECURSIVE chain (depth, id) AS (
    VALUES (0, :id)
    UNION ALL
    SELECT depth + 1, previous_id FROM chain JOIN responses USING (id)
    WHERE owner = :owner AND previous_id IS NOT NULL AND depth < :max_depth
)
SELECT chain.id, num_bytes FROM chain LEFT JOIN responses ON responses.id = chain.id AND owner = :owner
ORDER BY depth DESC
"""


class StoreError(QuireError):
    """The database cannot be read or written; nothing was partly written."""


class ResponseTooLargeError(StoreError):
    """One response is larger than the limit of the whole store."""


class ChainTooLongError(StoreError):
    """A chain has more or larger responses than may be read at once."""


class StoredResponse(msgspec.Struct, frozen=True):
    """A response and its input, both as JSON."""

    id: str
    previous_id: str | None
    running: bool
    """Whether it is still being generated."""
    response: bytes
    """The response object."""
    input_items: bytes
    """The input items of its own request, without those of earlier responses."""


class ResponseStore:
    """Owns the connection; all SQL runs sequentially in one thread."""

    def __init__(
        self, path: Path | None, *, max_responses: int, max_bytes: int, fail: Callable[[bytes, str], bytes]
    ) -> None:
        """Open or create the file, or a store in memory for None.

        `fail(response, reason)` returns the JSON of a response that ended early. It is called for responses that were
        running when an earlier server ended. Raises ConfigError if the file belongs to another program, has another
        version, is damaged or in use, or cannot be opened.
        """
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="response-store")
        try:
            self._connection = self._thread.submit(_open, path, fail).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def add(self, owner: str, new: StoredResponse) -> None:
        """Write a new response, and delete the oldest beyond the limits. Raises StoreError, ResponseTooLargeError."""
        await self._run(_write, _INSERT, owner, new, self._max_responses, self._max_bytes)

    async def update(self, owner: str, new: StoredResponse) -> None:
        """Update a response; has no effect if it was deleted meanwhile. Raises the same errors as `add`."""
        await self._run(_write, _UPDATE, owner, new, self._max_responses, self._max_bytes)

    async def get(self, owner: str, response_id: str) -> StoredResponse | None:
        """The response of that id, None if this owner has none. Raises StoreError."""
        return await self._run(_get, owner, response_id)

    async def chain(self, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse]:
        """Return the response and all responses that it continues, the oldest first.

        Raises KeyError with the id of a response that does not exist, or was deleted (perhaps to make space for newer
        ones), ChainTooLongError, StoreError.
        """
        return await self._run(_chain, owner, response_id, max_bytes)

    async def delete(self, owner: str, response_id: str) -> bool:
        """Delete a response. Returns False if this owner has none with this id. Raises StoreError."""
        return await self._run(_delete, owner, response_id)

    def close(self) -> None:
        """Finish pending calls, write the log into the file and close it."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    async def _run(self, call: Callable[Concatenate[sqlite3.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        work = asyncio.get_running_loop().run_in_executor(
            self._thread, partial(_translated, call, self._connection, *args, **kwargs)
        )
        return await asyncio.shield(work)  # a request that is cancelled leaves its transaction to its end


def _translated(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return call(*args, **kwargs)
    except (sqlite3.Error, OSError) as error:
        if _is_full(error):
            raise StoreError("the disk is full: the response store was not changed; free space on it") from error
        raise StoreError(f"the response store failed: {error}") from error


def _is_full(error: Exception) -> bool:
    """Whether an error says that the disk is full."""
    number = error.errno if isinstance(error, OSError) else None
    return number == errno.ENOSPC or getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL


def _open(path: Path | None, fail: Callable[[bytes, str], bytes]) -> sqlite3.Connection:
    try:
        if path is not None:  # no other user can read it at any time
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = sqlite3.connect(path or ":memory:", timeout=0.2, isolation_level=None)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"response store {path}: cannot be opened: {error}") from error
    try:
        _check_ours(connection, path)
        _prepare(connection, fail)
        if path is not None:
            path.chmod(0o600)
    except (OSError, sqlite3.Error, msgspec.MsgspecError, UnicodeDecodeError, TypeError) as error:
        connection.close()
        why = "the disk is full" if _is_full(error) else f"{error}; it may be damaged, or in use by another server"
        raise ConfigError(f"response store {path}: {why}") from error
    except ConfigError:
        connection.close()
        raise
    return connection


def _check_ours(connection: sqlite3.Connection, path: Path | None) -> None:
    """Raise ConfigError if the file belongs to another program, before anything is written to it."""
    connection.execute("PRAGMA locking_mode = EXCLUSIVE")
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
        return
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if application != APPLICATION_ID:
        raise ConfigError(
            f"response store {path}: this database belongs to another program; choose a file that does not exist yet"
        )
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"response store {path}: has schema version {version}, but this server requires {SCHEMA_VERSION}"
        )
    (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    if verdict != "ok":
        raise ConfigError(f"response store {path}: the file is damaged ({verdict}); remove or rename it")


def _prepare(connection: sqlite3.Connection, fail: Callable[[bytes, str], bytes]) -> None:
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA secure_delete = ON")  # what was deleted is not left in free pages
    with _transaction(connection):
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0:
            for statement in _SCHEMA:
                connection.execute(statement)
        for key, response in connection.execute("SELECT id, response FROM responses WHERE running").fetchall():
            failed = fail(response, "the server was restarted")
            connection.execute("UPDATE responses SET running = 0, response = ? WHERE id = ?", (failed, key))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """BEGIN IMMEDIATE ... COMMIT; ROLLBACK if anything fails, the commit itself included."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        fault_point("store.write")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _write(
    connection: sqlite3.Connection, statement: str, owner: str, new: StoredResponse, max_responses: int, max_bytes: int
) -> None:
    num_bytes = len(new.response) + len(new.input_items)
    with _transaction(connection):
        connection.execute(statement, {**msgspec.structs.asdict(new), "owner": owner, "num_bytes": num_bytes})
        _evict(connection, new.id, max_responses, max_bytes)


def _evict(connection: sqlite3.Connection, kept_id: str, max_responses: int, max_bytes: int) -> None:
    """Delete the oldest responses beyond the limits. Raises ResponseTooLargeError if `kept_id` alone exceeds them."""
    number, total = connection.execute("SELECT count(*), sum(num_bytes) FROM responses").fetchone()
    oldest = "SELECT id, num_bytes FROM responses WHERE id != ? ORDER BY rowid LIMIT 1"
    while number > max_responses or (number and total > max_bytes):
        row = connection.execute(oldest, (kept_id,)).fetchone()
        if row is None:
            raise ResponseTooLargeError(
                f"the response and its input have {total} bytes, but the response store holds at most {max_bytes}; "
                "set store=false"
            )
        connection.execute("DELETE FROM responses WHERE id = ?", (row[0],))
        number, total = number - 1, total - row[1]


def _get(connection: sqlite3.Connection, owner: str, response_id: str) -> StoredResponse | None:
    row = connection.execute(
        "SELECT id, previous_id, running, response, input_items FROM responses WHERE id = ? AND owner = ?",
        (response_id, owner),
    ).fetchone()
    if row is None:
        return None
    key, previous_id, running, response, input_items = row
    return StoredResponse(key, previous_id, bool(running), response, input_items)


def _chain(connection: sqlite3.Connection, owner: str, response_id: str, max_bytes: int) -> list[StoredResponse]:
    wanted = {"id": response_id, "owner": owner, "max_depth": MAX_CHAIN}
    sizes = connection.execute(_CHAIN, wanted).fetchall()
    for key, num_bytes in sizes:
        if num_bytes is None:
            raise KeyError(key)
    if len(sizes) > MAX_CHAIN or sum(num_bytes for _, num_bytes in sizes) > max_bytes:
        raise ChainTooLongError(
            f"the conversation up to {response_id} has more than {MAX_CHAIN} responses or {max_bytes:,} bytes"
        )
    found = (_get(connection, owner, key) for key, _ in sizes)
    return [stored for stored in found if stored is not None]


def _delete(connection: sqlite3.Connection, owner: str, response_id: str) -> bool:
    with _transaction(connection):
        return connection.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (response_id, owner)).rowcount > 0

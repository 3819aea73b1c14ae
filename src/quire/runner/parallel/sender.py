"""What a process that computes a part of an engine sends to the engine's: answers, failures, and that it lives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.common.errors import QuireError
from quire.common.log import logger
from quire.runner.parallel.messages import Connection, Failed, LoadAdapter, Message, UnloadAdapter
from quire.runner.parallel.pipeline.messages import Beat

if TYPE_CHECKING:
    from quire.runner.parallel.machines.node import Own
    from quire.runner.parallel.pipeline.executor import StageExecutor

_BEAT_S = 1.0
_MIN_CPU_S = 0.01
"""Processor time between two beats: a process that has used less is waiting for something."""


class Sender:
    """The socket, to which two threads send."""

    def __init__(self, connection: Connection, part: str, own: Own | None = None) -> None:
        """`part`: what this process computes, for the log. `own`: what another machine decides by itself. What has
        failed there is in its log, and sent with its number."""
        self._connection, self._part, self._own, self._lock = connection, part, own, threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message."""
        if self._own is not None and isinstance(message, Failed):
            logger.error("%s", message.text)
            message = Failed(message.kind, f"machine {self._own.node_rank}: {message.text}")
        with self._lock:
            self._connection.send(message)

    def failure(self, error: Exception) -> Failed:
        """Return the message of an error that is handled, and log the error, unless its message says all."""
        if not isinstance(error, QuireError):
            logger.exception("a %s failed", self._part)
        return Failed(type(error).__name__, str(error))

    def change_adapters(self, message: LoadAdapter | UnloadAdapter, executor: StageExecutor) -> None:
        """Load or unload an adapter, and send what has failed; Done follows."""
        try:
            if isinstance(message, LoadAdapter):
                executor.load_adapter(message.slot, message.folder, message.digest)
            else:
                executor.unload_adapter(message.slot)
        except Exception as error:
            self.send(self.failure(error))

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show once a second, in a thread, that this process lives, and whether it has used its CPU."""
        has_ended = threading.Event()
        threading.Thread(target=self._beat, args=(has_ended,), daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _beat(self, has_ended: threading.Event) -> None:
        used_s = time.process_time()
        while not has_ended.wait(_BEAT_S):
            before_s, used_s = used_s, time.process_time()
            try:
                self.send(Beat(used_s - before_s > _MIN_CPU_S))
            except OSError:  # the engine's process has ended
                return

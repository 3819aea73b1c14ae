"""Links to the other processes of an engine: how one that cannot be started, ends, or falls silent is noticed."""

import socket
import threading
from contextlib import closing
from queue import SimpleQueue
from typing import Any

import pytest
import torch

from quire.common import liveness
from quire.common.errors import EngineBrokenError
from quire.models.decoder.model import Boundary
from quire.runner.parallel import links
from quire.runner.parallel.messages import Connection, Done


def test_a_stage_that_cannot_be_reached_is_reported_with_how_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    is_sending = threading.Event()

    class Stage:
        def end(self, patience_s: float = 0.0) -> str:
            assert is_sending.wait(60)
            return "was ended by signal 9"

    def send(self: links.Link, frame: bytes) -> None:
        is_sending.set()
        raise BrokenPipeError

    monkeypatch.setattr(links.Link, "send", send)
    stages = links.Links([None], 1, [lambda sock: Stage()])
    with closing(stages), pytest.raises(EngineBrokenError, match="stage 0 was ended by signal 9"):
        stages.send(Done())


def test_a_part_that_cannot_be_started_is_reported_whatever_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(sock: socket.socket) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(links, "PATIENCE_S", 5.0)
    parts = links.Links([None], 1, [launch], "rank", 1)
    with closing(parts), pytest.raises(EngineBrokenError, match="rank 1 could not be started: can't start new thread"):
        parts.wait()


def test_a_stage_that_falls_silent_within_a_message_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        def __init__(self, sock: socket.socket) -> None:
            self._socket = sock.dup()
            Connection(self._socket).send(Done())
            self._socket.sendall((100).to_bytes(8, "little") + b"half")

        def end(self, patience_s: float = 0.0) -> str:
            self._socket.close()
            return "has ended"

    monkeypatch.setattr(liveness, "SILENCE_S", 0.3)
    lost = SimpleQueue[str]()
    link = links.Link("stage 0", Half, Boundary(1, 4, torch.float32), 8)
    link.when_lost = lost.put
    link.start()
    assert lost.get(timeout=60) == "stage 0 was silent for 0.3 s"
    link.close()


def test_a_stop_of_this_process_is_no_silence_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a stop, nothing may have come though the time to wait has passed."""
    is_readable, num_calls = Connection.is_readable, 0

    def stopped_once(self: Connection, timeout_s: float) -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls != 2 and is_readable(self, timeout_s)

    class Loaded:
        def __init__(self, sock: socket.socket) -> None:
            self._socket = sock.dup()
            for _ in range(2):
                Connection(self._socket).send(Done())

        def end(self, patience_s: float = 0.0) -> str:
            self._socket.close()
            return "has ended"

    monkeypatch.setattr(Connection, "is_readable", stopped_once)
    parts = links.Links([None], 1, [Loaded])
    with closing(parts):
        for _ in range(2):
            assert parts.wait() == []


def test_a_frame_that_is_too_long_is_refused_before_it_is_read() -> None:
    class Endless:
        def recv(self, num_bytes: int) -> bytes:
            assert num_bytes <= 65536
            return (10**12).to_bytes(8, "little")

    with pytest.raises(ValueError, match="a frame of 1000000000000 bytes, of at most 100"):
        Connection(Endless(), 100).receive_frame()  # type: ignore[arg-type]

"""The processes that compute parts of an engine beside its own, as this one has them: started, watched, relayed, ended.

They are the other ranks of this machine, the stages before the engine's own, or other machines.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Protocol

from quire.common import liveness
from quire.common.errors import EngineBrokenError, error_named
from quire.common.liveness import end_of, start_child
from quire.common.log import logger
from quire.runner.parallel.messages import Connection, Done, Failed, Message, to_frame
from quire.runner.parallel.pipeline.messages import FROM_STAGE, Beat, StageReady, States, StepFailed

if TYPE_CHECKING:
    from quire.models.decoder.model import Boundary

_TICK_S = 0.1
_SILENT_TICK_S = 1.0
_OTHER_BYTES = 1024**2
"""Of a frame, beside the states in it."""
PATIENCE_S = 120.0
"""How long this process waits for one that makes no progress, before it gives the engine up. A server that has a
shorter hang_timeout_s ends the engine sooner."""
EXIT_S = 2.0
"""A process ends when its socket is closed. After this time it is killed."""


class PartProcess(Protocol):
    """What computes a part, in a process of its own or, in tests, in a thread."""

    def end(self, patience_s: float = EXIT_S) -> str:
        """Wait for its end, which its closed socket has asked for, and force it after this time. Returns what was the
        end."""


Launch = Callable[[socket.socket], PartProcess]
"""Starts a stage with its end of the socket."""
LaunchRank = Callable[[socket.socket, int], PartProcess]
"""Starts a rank with its end of the socket, and the descriptor of the memory that the ranks of this machine share."""


class ChildProcess:
    """A rank in a child process."""

    module = "rank_process"

    def __init__(self, sock: socket.socket, *others: int) -> None:
        descriptors = [sock.fileno(), *others]
        self._process = start_child(f"quire.runner.parallel.{self.module}", [*map(str, descriptors)], descriptors)

    def end(self, patience_s: float = EXIT_S) -> str:
        """As PartProcess."""
        return end_of(self._process, patience_s)


class StageProcess(ChildProcess):
    """A stage in a child process."""

    module = "pipeline.stage_process"


class DistantStage:
    """What another machine computes, which has joined."""

    def __init__(self, sock: socket.socket) -> None:
        self._address = sock.getpeername()[0]

    def end(self, patience_s: float = EXIT_S) -> str:
        """As PartProcess."""
        return f"at {self._address} has ended, or cannot be reached"


class Link:
    """One of the processes. A thread starts it, since it ends with the thread that started it, and reads what it sends:
    answers are kept for `answer`, and what a stage has computed is passed on."""

    def __init__(self, name: str, source: Launch | socket.socket, boundary: Boundary | None, max_rows: int) -> None:
        """`source` starts it, or is the connection to one that has been started. `boundary` is what a stage gives to
        the next one, for at most `max_rows` tokens of a step; None for nothing."""
        self.name = name
        self.num_progress = 0
        """Beats with which it has computed, and what it has sent besides."""
        self.pass_on: Callable[[bytes, States | StepFailed], None]
        """Gets the frame and the message of what the next stage needs."""
        self.when_lost: Callable[[str], None]
        self._boundary, self._max_rows = boundary, max_rows
        self._answers = SimpleQueue[StageReady | Done | Failed]()
        self._sending = threading.Lock()
        self._is_loaded = self._is_closing = False
        ours, its = (source, source) if isinstance(source, socket.socket) else socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self._connection = Connection(ours)
        self._reading = Connection(ours.dup(), max_rows * (boundary.token_bytes if boundary else 0) + _OTHER_BYTES)
        """The same socket: a process may take longer to read while it computes than it may be silent."""
        self._thread = threading.Thread(target=self._run, args=(source, its), name=name, daemon=True)

    def start(self) -> None:
        """Start the process. `when_lost` is called if that fails, too."""
        self._thread.start()

    def _run(self, source: Launch | socket.socket, its: socket.socket) -> None:
        process, ended = None, ""
        try:
            process = _begun(source, its)
            ended = self._read()
        except Exception as error:  # of starting it, or of what it sends: the engine cannot go on without it
            ended = f"sends nonsense: {error}" if process else f"could not be started: {error}"
        self._shut_down()
        if process and not ended:
            ended = process.end()
        if not self._is_closing:
            self.when_lost(f"{self.name} {ended}")
        if process:
            process.end(0.0)  # one that is silent would not notice that its socket is closed

    def _read(self) -> str:
        """Read what it sends until its end. Returns why nothing more is read, if the process has not ended."""
        while self._can_read(limit_s := liveness.silence_s() if self._is_loaded else PATIENCE_S):
            self._reading.socket.settimeout(limit_s)
            try:
                frame = self._reading.receive_frame()
            except TimeoutError:
                break
            except OSError:
                frame = None
            if frame is None:
                return ""
            message = FROM_STAGE.decode(memoryview(frame)[8:])
            self.num_progress += not isinstance(message, Beat) or message.has_computed
            match message:
                case Beat():
                    pass
                case States() | StepFailed():
                    self._check(message)
                    self.pass_on(frame, message)
                case _:
                    self._is_loaded = True
                    self._answers.put(message)
        return f"was silent for {limit_s:g} s"

    def _can_read(self, limit_s: float) -> bool:
        """Wait for what it sends. Returns False if nothing comes in this time, of which a stop of this process takes at
        most a tick."""
        while limit_s > 0:
            tick_s = min(_SILENT_TICK_S, limit_s)
            if self._reading.is_readable(tick_s):
                return True
            limit_s -= tick_s
        return False

    def _check(self, states: States | StepFailed) -> None:
        if self._boundary is None:
            raise ValueError("the outcome of a step, which only stages have")
        if isinstance(states, StepFailed):
            return
        sizes = [len(each) for each in states.tensors]
        wanted = [states.num_rows * self._boundary.row_bytes] * self._boundary.num_tensors
        dtype = str(self._boundary.dtype).removeprefix("torch.")
        if not 0 <= states.num_rows <= self._max_rows or sizes != wanted or states.dtype != dtype:
            raise ValueError(
                f"{states.num_rows} rows of {states.dtype} in {sizes} bytes, where at most {self._max_rows} of {dtype} "
                f"in {wanted} bytes can come"
            )

    def send(self, frame: bytes) -> None:
        """Send what `to_frame` made. Raises OSError if the process has ended."""
        with self._sending:
            self._connection.send_frame(frame)

    def answer(self, timeout_s: float) -> StageReady | Done | Failed:
        """The next answer. Raises Empty if none comes in time."""
        return self._answers.get(timeout=timeout_s)

    def begin_to_close(self) -> None:
        """Let nothing that this process sends or should read keep another thread waiting."""
        self._is_closing = True
        self._shut_down()

    def _shut_down(self) -> None:
        """Let both ends read the end."""
        try:
            self._connection.socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end has closed it
            logger.debug("%s has closed its socket", self.name)

    def close(self) -> None:
        """End the process, and wait for its end."""
        self.begin_to_close()
        if self._thread.ident is not None:
            self._thread.join()
        self._connection.close()
        self._reading.close()


def check_loaded(answers: Sequence[StageReady | Failed]) -> None:
    """Raise what has failed where a model was loaded, or warn if the processors differ."""
    from quire import kernels  # late, as it imports torch

    for answer in answers:
        if isinstance(answer, Failed):
            raise error_named(answer.kind, answer.text)
    isas = {answer.isa for answer in answers if isinstance(answer, StageReady)} | {kernels.isa()}
    if len(isas) > 1:
        logger.warning("different kernels (%s) compute one model: the output is not that of one of them alone", isas)


def _begun(source: Launch | socket.socket, its: socket.socket) -> PartProcess:
    """What `source` starts with its end of the socket, or has started."""
    if isinstance(source, socket.socket):
        return DistantStage(source)
    with its:
        return source(its)


class Links:
    """All stages before the engine's own; all other ranks of this machine; or all machines besides this one, if these
    divide ranks."""

    def __init__(
        self,
        boundaries: Sequence[Boundary | None],
        max_rows: int,
        sources: Sequence[Launch | socket.socket],
        what: str = "stage",
        first: int = 0,
    ) -> None:
        """Starts them. `boundaries`: what each gives to the next one. They are called `what`, and numbered from `first`
        on."""
        self.lost: str | None = None
        """What has become of one that has ended by itself, or is silent."""
        self.when_lost: Callable[[], object] = lambda: None
        self._is_closed, self._has_lost = False, threading.Event()
        self._arrived = SimpleQueue[States | StepFailed | None]()
        self._links = [
            Link(f"{what} {number}", source, boundary, max_rows)
            for number, (boundary, source) in enumerate(zip(boundaries, sources, strict=True), start=first)
        ]
        for link, following in zip(self._links, [*self._links, None][1:], strict=True):
            link.pass_on = self._arrive if following is None else self._relay(following)
            link.when_lost = self._report
        for link in self._links:
            link.start()

    @staticmethod
    def _relay(following: Link) -> Callable[[bytes, States | StepFailed], None]:
        def pass_on(frame: bytes, message: States | StepFailed) -> None:
            try:
                following.send(frame)
            except OSError:  # its own thread reports that it has ended
                logger.debug("%s cannot be reached", following.name)

        return pass_on

    def _arrive(self, frame: bytes, message: States | StepFailed) -> None:
        self._arrived.put(message)

    def _report(self, what: str) -> None:
        if self.lost is not None or self._is_closed:
            return
        self.lost = what
        self._has_lost.set()
        logger.error("%s; without it this engine cannot go on", what)
        self._arrived.put(None)
        self.when_lost()
        if liveness.on_loss is not None:
            liveness.on_loss()

    def send(self, message: Message) -> None:
        """Send a message to all. Raises EngineBrokenError if one has ended."""
        if self._links:
            self._send_frames([to_frame(message)] * len(self._links))

    def send_each(self, messages: Sequence[Message]) -> None:
        """Send each its own message. Raises EngineBrokenError if one has ended."""
        self._send_frames([to_frame(message) for message in messages])

    def _send_frames(self, frames: Sequence[bytes]) -> None:
        """The last one first, so that no stage gets the states of a step that it does not know."""
        for link, frame in reversed(list(zip(self._links, frames, strict=True))):
            self.check()
            try:
                link.send(frame)
            except OSError as error:
                self._has_lost.wait(EXIT_S)
                raise EngineBrokenError(self.lost or f"{link.name} cannot be reached: {error}") from error

    def wait(self) -> list[StageReady | Failed]:
        """Wait until all have answered. Returns what they were asked for, or what has failed before they were done.

        Raises EngineBrokenError if one ends, sends nonsense, or makes no progress for PATIENCE_S.
        """
        return [answer for link in self._links for answer in self._answers_of(link)]

    def failures(self) -> list[Failed]:
        """As `wait`, what has failed alone."""
        return [answer for answer in self.wait() if isinstance(answer, Failed)]

    def _answers_of(self, link: Link) -> list[StageReady | Failed]:
        answers, patience = list[StageReady | Failed](), self._patience(link.name)
        while True:
            try:
                answer = link.answer(_TICK_S)
            except Empty:
                self.check()
                patience()
                continue
            if isinstance(answer, Done):
                return answers
            answers.append(answer)

    def states(self, number: int) -> States | StepFailed:
        """Wait for what the stages have computed in the step of this number; that of earlier ones is dropped. Raises
        EngineBrokenError as `wait`."""
        patience = self._patience("the other stages")
        while True:
            self.check()
            try:
                message = self._arrived.get(timeout=_TICK_S)
            except Empty:
                patience()
                continue
            if message is not None and message.number == number:
                return message

    def _patience(self, awaited: str) -> Callable[[], None]:
        """What is called now and then while this process waits. It raises EngineBrokenError after PATIENCE_S in which
        none has made progress, and lets progress of theirs count as progress of this process."""
        known, since_s = [link.num_progress for link in self._links], time.monotonic()

        def check() -> None:
            nonlocal known, since_s
            now = [link.num_progress for link in self._links]
            if now != known:
                known, since_s = now, time.monotonic()
                liveness.num_kernel_events += 2
            elif time.monotonic() - since_s > PATIENCE_S:
                raise EngineBrokenError(f"{awaited} made no progress for {PATIENCE_S:g} s")

        return check

    def check(self) -> None:
        """Raise EngineBrokenError if one has ended."""
        if self.lost is not None:
            raise EngineBrokenError(self.lost)

    def close(self) -> None:
        """End all, and wait for their end."""
        self._is_closed = True
        for link in self._links:
            link.begin_to_close()
        for link in self._links:
            link.close()

"""Fault points: named places where tests inject failures, in this process or through the environment of another.

    with inject(Fault("step.execute", error="MemoryError", after=3)) as injected:
        ...
    assert injected.num_fired == 1

The variable QUIRE_FAULTS does the same for a new process: it is a JSON list of faults, as `environment` writes it, and
is read once, when this module is imported. While no fault is armed, a fault point costs one look at a global variable.
"""

import builtins
import errno
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import msgspec

from quire.common.errors import ConfigError, nearest_name
from quire.common.log import logger

POINTS: dict[str, str] = {
    "step.start": "a step begins; nothing is scheduled yet",
    "step.execute": "the step is scheduled; the executor has not been called",
    "step.run": "the worker has moved blocks; the model has not run",
    "rank.step": "a rank other than the first is about to compute its part of a step",
    "stage.step": "a stage before the last is about to compute a step",
    "step.commit": "the executor has returned; nothing is committed",
    "step.end": "the step is committed",
    "blocks.allocate": "the first blocks of a sequence are about to be allocated; subject: its seq_id",
    "blocks.append": "more blocks of a sequence are about to be allocated; subject: its seq_id",
    "blocks.swap_out": "sequences are about to move to the host tier; subject: the first one's seq_id",
    "blocks.swap_in": "sequences are about to move back to the device; subject: the first one's seq_id",
    "cache.transfer": "a step's blocks are copied from one tier to another",
    "cache.copy": "a step's slots are copied from block to block",
    "weights.load": "a tensor of a checkpoint is read; subject: its name",
    "memory.workspace": "memory is allocated for the output of a kernel",
    "memory.native": "a native kernel allocates temporary memory; fails once, by std::bad_alloc; only `after` applies",
    "tokenizer.encode": "a text is tokenized",
    "draft.propose": "a drafter is asked for drafts of a sequence; subject: its seq_id",
    "draft.model": "a draft model is about to read a step's tokens",
    "grammar.compile": "a grammar is compiled, in a thread of its own",
    "grammar.mask": "a sequence's mask is filled; subject: its seq_id",
    "sampler.row": "a row of logits is changed (penalties, bias) before sampling; subject: the seq_id",
    "sampler.draw": "the tokens of all rows are sampled",
    "pool.sequence": "a sequence's hidden states are pooled; subject: its seq_id",
    "scoring.rows": "the log-probabilities of prompt tokens are computed",
    "commit.sequence": "a sequence's result is committed; subject: the seq_id",
    "detokenizer.append": "a token is added to an output",
    "detokenizer.text": "an output's text is read",
    "output.make": "a RequestOutput is made; subject: its request id",
    "api.send": "the API process writes a frame to the engine process",
    "api.receive": "the API process has read a frame from the engine process; subject: the message's type",
    "engine.send": "the engine process writes a frame to the API process",
    "engine.receive": "the engine process has read a frame from the API process; subject: the message's type",
    "engine.take": "the step loop adds a new request; subject: its request id",
    "trial.send": "a grammar is sent to the process that tests it",
    "trial.receive": "the process that tests grammars has answered",
    "http.send": "a part of an HTTP response is sent; subject: the ASGI message's type",
    "http.receive": "a part of an HTTP request has been received; subject: the ASGI message's type",
    "store.write": "a change of the response store is about to be committed",
    "batch.write": "a response is written to the partial file of a batch run",
    "log.write": "a line is written to the server's log",
}
"""Every fault point, with the moment at which it is passed. A fault can be limited to the subject of a point."""

_T = TypeVar("_T")
_Data = TypeVar("_Data", str, bytes)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A failure to inject: what fails, where, and how often. Raises ConfigError for unknown points and errors."""

    point: str
    action: Literal["raise", "delay", "exit", "kill", "stop", "write"] = "raise"
    """`exit` ends the process at once, `kill` sends it SIGKILL and `stop` SIGSTOP. `write` writes half of the data and
    then raises; at a point that writes no data it only raises."""
    error: str = "RuntimeError"
    """The name of the built-in exception to raise, or of an errno such as `ENOSPC` for an OSError."""
    seconds: float = 1.0
    """Length of the delay."""
    status: int = 1
    """Exit status of the process."""
    after: int = 0
    """Number of passes that succeed before the first failure."""
    times: int | None = 1
    """Number of passes that fail after that; None for all."""
    probability: float = 1.0
    """Probability with which each of those passes fails; passes that succeed by chance count as well."""
    subject: int | str | None = None
    """Only passes with this subject count; None for all passes."""

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ConfigError(f"unknown fault point {self.point!r}{nearest_name(self.point, POINTS)}")
        if not isinstance(self.exception(), Exception):
            raise ConfigError(f"error={self.error!r} is neither a built-in exception nor the name of an errno")
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability} is not between 0 and 1")

    def exception(self) -> Exception | None:
        """Return a new exception to raise; None if no exception of this name can be made from a message alone."""
        if isinstance(number := getattr(errno, self.error, None), int):
            return OSError(number, f"{os.strerror(number)} (injected at {self.point})")
        kind = getattr(builtins, self.error, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return None
        try:
            return kind(f"injected at {self.point}")
        except TypeError:  # its constructor needs more than a message
            return None


@dataclass(eq=False)
class Injected:
    """A fault that is armed, with its counters."""

    fault: Fault
    num_passed: int = 0
    subjects: list[object] = field(default_factory=list)
    """The subject of each pass that failed because of this fault."""

    @property
    def num_fired(self) -> int:
        """Number of passes that failed because of this fault."""
        return len(self.subjects)

    def passes(self, point: str, subject: object) -> bool:
        """Count a pass of a point and return whether it succeeds."""
        fault = self.fault
        if fault.point != point or (fault.subject is not None and fault.subject != subject):
            return True
        self.num_passed += 1
        num_over = self.num_passed - fault.after
        if num_over <= 0 or (fault.times is not None and num_over > fault.times):
            return True
        if fault.probability < 1 and random.random() >= fault.probability:
            return True
        self.subjects.append(subject)
        return False


_armed: tuple[Injected, ...] = ()
_lock = threading.Lock()
_NATIVE = "memory.native"
_refuse_memory: Callable[[int], bool] | None = None


def fault_point(name: str, subject: object = None) -> None:
    """Mark a place where tests can inject a failure."""
    if _armed:
        for fault in _due(name, subject):
            _act(fault)


def fault_write(name: str, write: Callable[[_Data], _T], data: _Data) -> _T:
    """Call `write(data)`, at a place where tests can inject a failure before or in the middle of writing."""
    if _armed:
        for fault in _due(name, None):
            if fault.action == "write":
                write(data[: len(data) // 2])
            _act(fault)
    return write(data)


def _due(name: str, subject: object) -> list[Fault]:
    assert name in POINTS, f"fault point {name!r} is not in the table"
    with _lock:
        return [injected.fault for injected in _armed if not injected.passes(name, subject)]


def _act(fault: Fault) -> None:
    match fault.action:
        case "delay":
            time.sleep(fault.seconds)
        case "exit":
            os._exit(fault.status)
        case "kill" | "stop":
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
        case _:
            error = fault.exception()
            assert error is not None
            raise error


@contextmanager
def inject(fault: Fault) -> Iterator[Injected]:
    """Arm a fault, in this process and all its threads, until the end of the block."""
    injected = Injected(fault)
    _arm(*_armed, injected)
    if fault.point == _NATIVE and _refuse_memory is not None:
        _refuse_memory(fault.after)
    try:
        yield injected
    finally:
        _arm(*(other for other in _armed if other is not injected))
        if fault.point == _NATIVE and _refuse_memory is not None and _refuse_memory(-1):
            injected.subjects.append(None)


def _arm(*injected: Injected) -> None:
    global _armed
    with _lock:
        _armed = injected


def arm_native(refuse_memory: Callable[[int], bool]) -> None:
    """Register how native code injects failed allocations; called when the native extension has been loaded.

    `refuse_memory(n)` lets n more allocations succeed and then one fail; a negative n cancels. It returns True if the
    failure of the previous call has already happened.
    """
    global _refuse_memory
    _refuse_memory = refuse_memory
    for injected in _armed:
        if injected.fault.point == _NATIVE:
            refuse_memory(injected.fault.after)


def environment(*faults: Fault) -> dict[str, str]:
    """Return the environment variables with which a new process starts with these faults armed."""
    return {"QUIRE_FAULTS": msgspec.json.encode(faults).decode()}


def _arm_from_environment(given: str | None) -> None:
    if not given:
        return
    try:
        faults = msgspec.json.decode(given, type=list[Fault])
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigError(f"QUIRE_FAULTS={given!r} is not a JSON list of faults: {error}") from error
    logger.warning("QUIRE_FAULTS is set: this process will fail on purpose, at %s", ", ".join(f.point for f in faults))
    _arm(*map(Injected, faults))


_arm_from_environment(os.environ.get("QUIRE_FAULTS"))

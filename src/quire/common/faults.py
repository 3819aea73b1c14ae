"""Named places where a test makes something fail: in this process by `inject`, in another by its environment.

    with inject(Fault("step.execute", error="MemoryError", after=3)) as injected:
        ...
    assert injected.num_fired == 1

The variable QUIRE_FAULTS holds the same for a process to come, as `environment` writes it: a JSON list of faults. It is
read once, when this module is loaded. Where nothing is armed a point costs a look at one global name.
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
    "step.start": "a step begins: nothing is planned yet",
    "step.execute": "the step is planned, the executor not called yet",
    "step.run": "in the worker: blocks are moved, the model has not run",
    "step.commit": "the executor has returned, nothing is committed",
    "step.end": "the step is committed",
    "blocks.allocate": "a sequence is about to be given its first blocks; subject: its seq_id",
    "blocks.append": "a sequence is about to be given more blocks; subject: its seq_id",
    "blocks.swap_out": "sequences are about to move to the host tier; subject: the first's seq_id",
    "blocks.swap_in": "sequences are about to move back to the device; subject: the first's seq_id",
    "cache.transfer": "a step's blocks are copied from one tier to another",
    "cache.copy": "a step's slots are copied from block to block",
    "weights.load": "a tensor of a checkpoint is read; subject: its name",
    "memory.workspace": "memory is taken for what a kernel puts out",
    "memory.native": "a kernel takes memory to work in; fails once, by std::bad_alloc, and only `after` counts",
    "tokenizer.encode": "a text becomes tokens",
    "grammar.compile": "a grammar is compiled, in its thread",
    "grammar.mask": "a sequence's mask is filled; subject: its seq_id",
    "sampler.row": "a row of logits with changes is made ready for its draw; subject: the seq_id",
    "sampler.draw": "the tokens of all rows are drawn",
    "scoring.rows": "tokens given beforehand are scored",
    "commit.sequence": "a sequence's result is committed; subject: the seq_id",
    "detokenizer.append": "an output gets a token",
    "detokenizer.text": "an output's text is asked for",
    "output.make": "a request's output is made; subject: its request id",
    "api.send": "the API process writes a frame to the engine process",
    "api.receive": "the API process has read a frame of the engine process; subject: the message's type",
    "engine.send": "the engine process writes a frame to the API process",
    "engine.receive": "the engine process has read a frame of the API process; subject: the message's type",
    "engine.take": "the step loop takes a request; subject: its request id",
    "trial.send": "a grammar is written to the process that tries it",
    "trial.receive": "that process has answered",
    "http.send": "a part of an HTTP answer goes to the server; subject: the message's type",
    "http.receive": "a part of an HTTP request has come from the server; subject: the message's type",
    "store.write": "a change of the response store is about to be committed",
    "batch.write": "an answer is written to a batch's partial file",
    "log.write": "a line is written to the server's log",
}
"""every point there is, and when it is passed. Its subject, where it has one, is what a fault may be limited to"""

_T = TypeVar("_T")
_Data = TypeVar("_Data", str, bytes)


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong, where, and how often. Raises ConfigError for a point or an error that there is not."""

    point: str
    action: Literal["raise", "delay", "exit", "kill", "write"] = "raise"
    """`exit` ends the process at once, `kill` by SIGKILL; `write` lets half of what is written through before it
    raises, and does nothing at a point that writes nothing"""
    error: str = "RuntimeError"
    """to raise: a built-in exception, or by the name of its number (`ENOSPC`) an OSError"""
    seconds: float = 1.0
    """of the delay"""
    status: int = 1
    """to exit with"""
    after: int = 0
    """so many passes go well first"""
    times: int | None = 1
    """so many passes fail then; None: all"""
    probability: float = 1.0
    """with which each of those fails; one that does not still counts"""
    subject: int | str | None = None
    """only passes with this subject count; None: all do"""

    def __post_init__(self) -> None:
        if self.point not in POINTS:
            raise ConfigError(f"there is no fault point {self.point!r}{nearest_name(self.point, POINTS)}")
        if not isinstance(self.exception(), Exception):
            raise ConfigError(f"error={self.error!r} is neither a built-in exception nor an error number's name")
        if not 0 <= self.probability <= 1:
            raise ConfigError(f"probability={self.probability} is not between 0 and 1")

    def exception(self) -> Exception | None:
        """A new one, to be raised; None if there is none of this name that has a message alone."""
        if isinstance(number := getattr(errno, self.error, None), int):
            return OSError(number, f"{os.strerror(number)} (injected at {self.point})")
        kind = getattr(builtins, self.error, None)
        if not isinstance(kind, type) or not issubclass(kind, Exception):
            return None
        try:
            return kind(f"injected at {self.point}")
        except TypeError:  # it is made of more than a message
            return None


@dataclass(eq=False)
class Injected:
    """A fault that is armed."""

    fault: Fault
    num_passed: int = 0
    subjects: list[object] = field(default_factory=list)
    """of the passes that it made fail"""

    @property
    def num_fired(self) -> int:
        """Passes that it made fail."""
        return len(self.subjects)

    def passes(self, point: str, subject: object) -> bool:
        """Count a pass; False if it is to fail."""
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
    """A place that tests may make fail."""
    if _armed:
        for fault in _due(name, subject):
            _act(fault)


def fault_write(name: str, write: Callable[[_Data], _T], data: _Data) -> _T:
    """`write(data)`, at a place that tests may make fail, also when a part of the data is written."""
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
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
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
    """The native code is loaded, and `refuse_memory` is how it fails: after so many more requests for memory one is
    refused, negative: none is. The answer is True if none is due any more from the call before."""
    global _refuse_memory
    _refuse_memory = refuse_memory
    for injected in _armed:
        if injected.fault.point == _NATIVE:
            refuse_memory(injected.fault.after)


def environment(*faults: Fault) -> dict[str, str]:
    """What a process to come has to find in its environment to have these armed."""
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

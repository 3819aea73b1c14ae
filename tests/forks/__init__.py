"""Engines, ranks and servers of tests that start at once: each is forked from a process that has all imported.

Importing torch takes 1.5 seconds of processor time, and the tests start hundreds of engines. What runs in a fork is
what `python -m MODULE` would run, with the same arguments, environment, folder and descriptors. Only its parent
differs: it is the fork server, which ends with the process that runs the tests, and with it all that it has started.
Where a test sets environment variables, a process of its own is started, since many are read when a module is imported.
"""

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from quire.interfaces.launch import link
from quire.runner.parallel import links
from tests.forks.wire import Request, read, receive_number, send

READ_EARLY = ("QUIRE_", "OMP_", "MKL_", "LD_", "PYTHONHASHSEED", "HF_", "NO_COLOR", "FORCE_COLOR")
"""How variables begin that may be read when something is imported: a fork has those of the fork server."""
READ_LATE = {"QUIRE_API_KEY", "QUIRE_FAULTS", "QUIRE_MASTER_SECRET"}
"""Of these, those that a fork reads itself."""


class Forked:
    """A forked process, with the part of subprocess.Popen that is used of engines and servers."""

    def __init__(self, path: str, request: Request, descriptors: Sequence[int]) -> None:
        self.returncode: int | None = None
        self._socket = send(path, request, descriptors)
        self.pid = receive_number(self._socket)

    def poll(self) -> int | None:
        """The status if the process has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end, and return the status; a negative one is a signal. Several threads may wait."""
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._socket, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(receive_number(self._socket, socket.MSG_PEEK))
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> "Forked":
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()

    def __del__(self) -> None:
        self._socket.close()


class ForkServer:
    """The process that forks, as its forks see it."""

    def __init__(self, path: str, environment: dict[str, str]) -> None:
        self.path = path
        self.environment = environment
        """with which it was started"""

    def ready(self) -> str:
        """Its path, at which it listens."""
        return self.path

    def can_run(self, environment: dict[str, str]) -> bool:
        differing = {name for name, _ in set(environment.items()) ^ set(self.environment.items())} - READ_LATE
        return not any(name.startswith(READ_EARLY) for name in differing)

    def start_engine(self, its: socket.socket, variables: Mapping[str, str]) -> "Forked | subprocess.Popen[bytes]":
        """As link.start_process."""
        module = "quire.engine.process.engine_process"
        forked = self._fork(module, [str(its.fileno())], [its.fileno()], variables)
        return forked or _start_unforked(its, variables)

    def start_child(
        self, module: str, arguments: Sequence[str], descriptors: Sequence[int]
    ) -> "Forked | subprocess.Popen[bytes]":
        """As links.start_child."""
        return self._fork(module, arguments, descriptors) or _start_child_unforked(module, arguments, descriptors)

    def _fork(
        self,
        module: str,
        arguments: Sequence[str],
        descriptors: Sequence[int],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> Forked | None:
        """None if the environment of this process is not that of the fork server."""
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)), **variables)
        if not self.can_run(environment):
            return None
        with open(os.devnull, "rb") as nothing:
            request = Request(module, list(arguments), environment, os.getcwd(), [0, 1, 2, *descriptors], True)
            return Forked(self.ready(), request, [nothing.fileno(), 1, 2, *descriptors])


class _OwnServer(ForkServer):
    """A fork server that is started here, when it is first needed."""

    _process: subprocess.Popen[bytes] | None = None

    def ready(self) -> str:
        with _starting:
            if self._process is None:
                with socket.socket(socket.AF_UNIX) as listener:
                    listener.bind(self.path)
                    listener.listen(128)
                    descriptor = listener.fileno()
                    command = [sys.executable, "-m", "tests.forks.server", str(descriptor), self.path]
                    self._process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, pass_fds=[descriptor], env=self.environment
                    )
        return self.path

    def end(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()  # at which it ends
            self._process.wait(60)


_starting = threading.Lock()
_start_unforked = link.start_process
_start_child_unforked = links.start_child
_server: ForkServer | None = None


def use(server: ForkServer) -> None:
    """From now on the engines that this process starts are forked."""
    global _server
    _server = server
    link.start_process = server.start_engine


def start() -> None:
    """Start the fork server, which otherwise starts with the first fork."""
    if _server is not None:
        _server.ready()


def run_quire(arguments: Sequence[str], output: int, environment: dict[str, str]) -> "Forked | subprocess.Popen[bytes]":
    """Run `python -m quire`, which writes to a descriptor."""
    if _server is None or not _server.can_run(environment):
        command = [sys.executable, "-m", "quire", *arguments]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    request = Request("quire", list(arguments), environment, os.getcwd(), [0, 1, 2], False)
    return Forked(_server.ready(), request, [0, output, output])


def command(folder: Path, environment: Mapping[str, str]) -> Path:
    """Write the command `quire` into a folder that exists: with this environment it is forked if it can be."""
    path = folder / "quire"
    if _server is None or not _server.can_run(dict(environment)):
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m quire "$@"\n')
    else:
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path[:0] = [{here!r}]; import command; command.main({_server.ready()!r}, sys.argv[1:])"
        path.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", "-c", code])} "$@"\n')
    path.chmod(0o755)
    return path


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, or has had forked, and that have not ended."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []
    own = list[int]()
    for task in tasks:
        with contextlib.suppress(OSError):  # a thread that has ended meanwhile
            own += map(int, (task / "children").read_text().split())
    return own if _server is None else own + json.loads(read(send(_server.ready(), pid)))


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Meanwhile engines are forked, and ranks of engines in this process. Those of an engine process are its children,
    since the system ends them with it. The fork server is started with the first fork."""
    global _server
    with tempfile.TemporaryDirectory() as folder:
        server = _OwnServer(f"{folder}/socket", dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))))
        use(server)
        links.start_child = server.start_child
        try:
            yield
        finally:
            _server, link.start_process = None, _start_unforked
            links.start_child = _start_child_unforked
            server.end()

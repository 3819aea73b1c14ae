"""Machines in threads of the test's own process, or in processes, on loopback addresses, and links that break."""

import os
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.common import liveness
from quire.common.errors import EngineBrokenError
from quire.config.model import ModelConfig
from quire.engine.llm_engine import LLMEngine
from quire.runner.parallel.machines import machine_process
from quire.runner.parallel.machines.node import Own
from quire.runner.parallel.machines.nodes import fingerprint, join
from tests.forks import children_of
from tests.parallel.ends import PARAMS, PROMPTS, TINY, wait_until_gone
from tests.parallel.ranks import ThreadRank, answers, in_threads
from tests.parallel.test_nodes import HOST, PORT, InThread, machine

BOTH: dict[str, Any] = {**TINY, "num_threads": 1, "nnodes": 2, "master_addr": f"{HOST}:{PORT}"}


def distant_ranks(rank: int, address: tuple[str, int] = (HOST, PORT), **given: Any) -> InThread:
    """A machine in a thread, with threads as ranks, of an engine with these arguments."""
    args = BOTH | given

    def run() -> None:
        config = ModelConfig.resolve(
            args.get("model"), quantization=args.get("quantization"), dtype=args.get("dtype", "auto")
        )
        this = machine(
            rank, host=address[0], port=address[1], nnodes=args["nnodes"], num_ranks=args["tensor_parallel_size"]
        )
        sock, wire = [join(this, fingerprint(config), number) for number in range(this.num_connections)]
        with sock, wire, suppress(OSError, EngineBrokenError):
            own = Own(rank, str(config.path), 1, (), args.get("memory_limit_bytes"), args["nnodes"])
            machine_process.serve(sock, wire, own, ThreadRank, pins=False)

    return InThread(run)


def of_machines(prompts: Any = PROMPTS, params: Any = PARAMS, **given: Any) -> Any:
    """The answers of an engine of ranks on several machines."""
    with in_threads():
        others = [distant_ranks(rank, **given) for rank in range(1, (BOTH | given)["nnodes"])]
        llm = LLM(**BOTH | given)
        try:
            return answers(llm, prompts, params)
        finally:
            llm.engine.executor.close()
            assert [other.result() for other in others] == [None] * len(others)


class Link(threading.Thread):
    """Passes on what machine 0 and another one send, until it is interrupted: then it passes on nothing."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._server = socket.create_server((HOST, 0))
        self.address = self._server.getsockname()
        self._socks = dict[socket.socket, socket.socket]()
        self._interruption, self._interrupted = os.pipe()
        self.start()

    def run(self) -> None:
        while True:
            readable, _, _ = select.select([self._interruption, self._server, *self._socks], [], [])
            if self._interruption in readable:
                return
            for sock in readable:
                if sock is self._server:
                    self._connect()
                    continue
                data = sock.recv(65536)
                if not data:
                    return
                self._socks[sock].sendall(data)

    def _connect(self) -> None:
        near, _ = self._server.accept()
        while True:
            with suppress(ConnectionRefusedError):
                far = socket.create_connection((HOST, PORT))
                break
        self._socks |= {near: far, far: near}

    def interrupt(self) -> None:
        os.close(self._interrupted)
        self.join(60)

    def close(self) -> None:
        for sock in (self._server, *self._socks):
            sock.close()
        os.close(self._interruption)


def allow_a_second_of_silence(patch: pytest.MonkeyPatch, limit: tuple[Any, str] = (liveness, "SILENCE_S")) -> None:
    """To links that have loaded: not before, since the machine that runs the test may be stalled for a while. Returns
    when a link counts with it."""
    counts, silence_s = threading.Event(), liveness.silence_s

    def noted() -> float:
        limit_s = silence_s()
        if limit_s == 1.0:
            counts.set()
        return limit_s

    patch.setattr(liveness, "silence_s", noted)
    patch.setattr(liveness, "_LEAST_SILENCE_S", 1.0)
    patch.setattr(*limit, 1.0)
    assert counts.wait(60)


def run_on(engine: LLMEngine) -> None:
    while True:
        engine.step()


@contextmanager
def node_process(secret: Path, **given: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Machine 1 of an engine with these arguments, in a process."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    command = [sys.executable, "-m", "quire", "serve", *options, "--node-rank=1", f"--master-secret-file={secret}"]
    process = subprocess.Popen(command)
    try:
        yield process
    finally:
        left = descendants(process.pid)
        process.terminate()
        process.wait(60)
        wait_until_gone(left)


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that these have started."""
    children = children_of(pid)
    return children + [each for child in children for each in descendants(child)]

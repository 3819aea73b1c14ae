"""A driver as a process of its own, which is stopped while others are measured, so that it uses no processor time."""

import json
import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.engines.peers import ROOT, Engine, LeftOutError

_PATIENCE_S = 30


class Session:
    """One engine with a loaded model. Its process runs only during a call."""

    def __init__(self, engine: Engine, checkpoint: Path, max_model_len: int) -> None:
        engine.install()
        self.engine = engine
        command = engine.command(checkpoint, max_model_len)
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **engine.variables()}
        self._log = engine.folder / "logs" / f"{engine.label}.log"
        self._log.parent.mkdir(parents=True, exist_ok=True)
        start = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        try:
            self.load_s: float = self._answer()["load_s"]
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - start
        self._signal(signal.SIGSTOP)

    def call(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Send a request and return the answer. Raises LeftOutError if the driver ends instead."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        print(json.dumps({"op": op} | arguments), file=self._process.stdin, flush=True)
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        """End the driver and its child processes."""
        for number in (signal.SIGCONT, signal.SIGTERM):
            self._signal(number)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._signal(signal.SIGKILL)
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"the driver ended; see {self._log}"}
        if "error" in answer:
            raise LeftOutError(answer["error"])
        return answer

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # it has already ended
            os.killpg(self._process.pid, number)

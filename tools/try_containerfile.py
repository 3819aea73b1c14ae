"""Try the steps of deploy/Containerfile one by one, where no container engine runs: `try_containerfile.py`.

Each stage gets a folder as its root, to which the absolute paths of its steps are mapped; `python` is the Python that
runs this program. RUN, COPY, ENV and ARG take effect in it, `apt-get install` and `useradd` are simulated, and at the
end the entry point serves on a free port until the health check succeeds and the stop signal has ended it.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).resolve().parents[1]
_MAPPED = ("/opt/quire", "/source", "/home/quire")
_SIMULATED = {
    "apt-get install": "apt-get install --simulate",
    "apt-get update": "true",
    "rm -rf /var/lib/apt": "true rm",
}
_START_S = 60


class Steps:
    """The state that the steps change: the current stage's files and environment."""

    def __init__(self, folder: Path) -> None:
        self._root = folder / "root"
        self._stages = folder / "stages"
        self._shims = folder / "bin"
        self._shims.mkdir()
        (self._shims / "python").symlink_to(sys.executable)
        self._name = ""
        self._port = _free_port()
        self._environment: dict[str, str] = {}
        self._folder = self._root
        self._entry, self._health = list[str](), ""
        self._stop_signal = signal.SIGTERM

    def take(self, instruction: str, value: str) -> None:
        """Carry out one instruction. Raises CalledProcessError, and ValueError for an instruction that is not known."""
        print(f"{instruction} {' '.join(value.split())}", flush=True)
        match instruction:
            case "FROM":
                self._begin_stage(value)
            case "ARG" | "ENV":
                for word in shlex.split(value):
                    name, _, text = word.partition("=")
                    self._environment[name] = self._map(text)
            case "WORKDIR":
                self._folder = Path(self._map(value))
                self._folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(shlex.split(value))
            case "RUN":
                self._run(value)
            case "ENTRYPOINT":
                self._entry = json.loads(value)
            case "HEALTHCHECK":
                self._health = value
            case "STOPSIGNAL":
                self._stop_signal = signal.Signals[value]
            case "USER" | "EXPOSE" | "COMMENT":
                pass
            case _:
                raise ValueError(f"{instruction} is not known here: add it to tools/try_containerfile.py")

    def serve(self) -> None:
        """Start the entry point, wait until the health check succeeds, and stop it."""
        command = [self._map(word) for word in self._entry] + ["--port", str(self._port)]
        check = json.loads(self._health[self._health.index("[") :].replace(":8000", f":{self._port}"))
        server = subprocess.Popen(command, cwd=self._root, env=self._env() | {"QUIRE_API_KEY": "a-key-for-the-trial"})
        try:
            ends_s = time.monotonic() + _START_S
            while subprocess.run(check, env=self._env(), stderr=subprocess.DEVNULL).returncode:
                if time.monotonic() > ends_s or server.poll() is not None:
                    raise SystemExit(f"the health check failed for {_START_S} s, or the server ended")
                time.sleep(0.2)
            server.send_signal(self._stop_signal)
            if status := server.wait(_START_S):
                raise SystemExit(f"the server ended with status {status} after the stop signal")
        finally:
            server.kill()
        print("the server was healthy, and ended when it was told to")

    def _begin_stage(self, value: str) -> None:
        if self._name:
            self._stages.mkdir(exist_ok=True)
            self._root.rename(self._stages / self._name)  # each stage has its files at the same place
        self._root.mkdir()
        self._name = value.rpartition(" AS ")[2]
        self._environment, self._folder = {}, self._root

    def _copy(self, words: list[str]) -> None:
        source = ROOT
        if words[0].startswith("--from="):
            source = self._stages / words.pop(0).removeprefix("--from=")
        *names, target = words
        to = Path(self._map(target)) if target.startswith("/") else self._folder / target
        for name in names:
            path = source / name.lstrip("/")
            if path.is_dir():
                shutil.copytree(path, to, symlinks=True, dirs_exist_ok=True)
            else:
                to.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, to)

    def _run(self, value: str) -> None:
        for step, instead in _SIMULATED.items():
            value = value.replace(step, instead)
        if "useradd" in value:
            print("  not tried: it would add a user to this machine")
            return
        subprocess.run(["sh", "-euc", self._map(value)], cwd=self._folder, env=self._env(), check=True)

    def _map(self, text: str) -> str:
        for path in _MAPPED:
            text = re.sub(rf"(?<![\w/]){path}\b", f"{self._root}{path}", text)
        return text

    def _env(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("QUIRE_", "VIRTUAL_ENV"))}
        return kept | self._environment | {"PATH": f"{self._shims}:{os.environ['PATH']}"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    """Try all steps; the exit status is that of the first one that fails."""
    with tempfile.TemporaryDirectory() as folder:
        steps = Steps(Path(folder))
        content = BytesIO((ROOT / "deploy" / "Containerfile").read_bytes())
        try:
            for step in DockerfileParser(fileobj=content).structure:
                steps.take(step["instruction"], step["value"])
            steps.serve()
        except subprocess.CalledProcessError as error:
            print(f"failed with status {error.returncode}", file=sys.stderr)
            return int(error.returncode)
    return 0


if __name__ == "__main__":
    sys.exit(main())

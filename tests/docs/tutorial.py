"""Runs a tutorial as a reader would: its blocks of code in order, in an empty folder, and compares what they print.

- A block with a file's name as its title is saved under that name.
- `bash` and `python` blocks without a title are run. The title "keep running" starts the command in the background.
- A `text` block is the output of the block before it; `...` stands for any text. The title "for example" marks output
  that differs between machines, and is not compared.
- `console` blocks need a network, and are not run.

Ports are replaced by free ones, so that tutorials can run side by side.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tests import forks
from tests.ports import free_port

KEEP_RUNNING, EXAMPLE = "keep running", "for example"
START_S = 90
COMMAND_S = 300
_BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    """All blocks of code that name a language."""
    return [Block(*found) for found in _BLOCK.findall(page.read_text(encoding="utf-8"))]


def matches(printed: str, shown: str) -> bool:
    """Whether the output is the text shown, in which `...` stands for any text. White space at the ends is ignored."""
    lines = (re.escape(line.rstrip()).replace(r"\.\.\.", ".*") for line in shown.strip().splitlines())
    pattern = "\n".join(lines).replace("\n.*\n", "\n(.*\n)*")
    return (
        re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.strip().splitlines()), re.DOTALL) is not None
    )


class Reader:
    """Someone who follows a tutorial in a folder."""

    def __init__(self, folder: Path, *, is_forked: bool = True) -> None:
        """`is_forked`: whether the command `quire` may be forked, which one sees of its process."""
        self.folder = folder
        self.ports: dict[str, str] = {}
        self.running = ExitStack()
        self.environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        commands = folder.parent / f"{folder.name}-commands"
        commands.mkdir()
        if is_forked:
            forks.command(commands, self.environment)
        path = (str(commands), str(Path(sys.executable).parent), os.environ.get("PATH", ""))
        self.environment["PATH"] = os.pathsep.join(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.close()

    def follow(self, page: Path) -> None:
        """Do everything that the page says. Fails with a command, or with output that is not the page's."""
        printed = ""
        for block in blocks(page):
            if block.language == "text" and block.title in ("", EXAMPLE):
                assert printed.strip(), f"nothing was printed where {page.name} shows: {block.text}"
                assert block.title or matches(printed, block.text), f"{printed}\nis not\n{block.text}"
            elif block.title == KEEP_RUNNING:
                self.running.enter_context(self._background(block.text.strip()))
            elif block.title:
                (self.folder / block.title).write_text(self._with_ports(block.text), encoding="utf-8")
            elif block.language in ("bash", "python"):
                printed = self._run(block)

    def _run(self, block: Block) -> str:
        text = self._with_ports(block.text)
        command = ["bash", "-euo", "pipefail", "-c", text]
        if block.language == "python":
            command = [sys.executable, "-c", text]
        elif "quire top" in text:
            command[-1] = text.replace("quire top", f"quire top --url http://127.0.0.1:{self.ports['8000']}")
        run = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_S,
        )
        assert run.returncode == 0, f"{block.text}\n{run.stdout}\n{run.stderr}"
        return run.stdout if run.stdout.strip() else run.stderr

    @contextmanager
    def _background(self, command: str):
        documented = "8000" if command.startswith("quire serve") else "8080"
        port = self.ports[documented] = str(free_port())
        command = f"{command} --port {port}"
        if documented == "8080":
            command += f" --server http://127.0.0.1:{self.ports['8000']}"
        with (self.folder / f"log-{documented}").open("wb") as log:
            process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, stdout=log, stderr=log
            )
            try:
                self._wait(process, f"http://127.0.0.1:{port}/{'ready' if documented == '8000' else ''}")
                yield
            finally:
                process.send_signal(signal.SIGINT if documented == "8000" else signal.SIGKILL)
                process.wait(START_S)

    def _wait(self, process: subprocess.Popen[bytes], url: str) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and process.poll() is None:
            try:
                with urllib.request.urlopen(url):
                    return
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.05)
        raise AssertionError("".join(path.read_text() for path in self.folder.glob("log-*")))

    def _with_ports(self, text: str) -> str:
        for documented, port in self.ports.items():
            text = text.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{port}")
        return text

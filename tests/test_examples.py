"""Each program in examples/ runs with the embedded model and prints what it is for."""

import io
import json
import re
import runpy
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.clients.served import KEY, Served, quire_serve

EXAMPLES = Path(__file__).parents[1] / "examples"
DUMPS = "Serialize ``obj`` to a JSON formatted ``str``."
REPLACE = "Rename a file or directory, overwriting the destination."
QUESTION = "What does json.dumps do?"

IN_PROCESS = {
    "offline_batch.py": re.escape(f"{QUESTION},{DUMPS}"),
    "prefix_sharing.py": r"on : (\d+) prompt tokens, \d{4} .*off: \1 prompt tokens, 0 .*the answers are the same",
    "structured_extraction.py": r"'sentiment': '(positive|neutral|negative)', 'stars': [1-5]",
    "beam_search.py": rf"-1\.\d+  '{re.escape(DUMPS)}'",
    "logits_processors.py": rf"^{re.escape(DUMPS)}\n[^`]+$",
    "terminal_chat.py": rf"{re.escape(DUMPS)}\n  \[0 tokens.*{REPLACE}\n  \[[1-9]\d* tokens",
}
WITH_A_SERVER = {
    "streaming_client.py": rf"^{re.escape(DUMPS)}\n\[\d+ tokens in, \d+ out\]",
    "agent.py": "^call: .*\nanswer: ",
}
OTHERS = {"async_llm.py", "app.py"}


def run(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    monkeypatch.setattr(sys, "argv", [name, *args])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_has_a_test_and_a_row() -> None:
    programs = {path.relative_to(EXAMPLES) for path in EXAMPLES.rglob("*.py")}
    assert {path.name for path in programs} == {*IN_PROCESS, *WITH_A_SERVER, *OTHERS}
    table = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert [path for path in programs if f"({path})" not in table] == []


@pytest.mark.parametrize("name", IN_PROCESS)
def test_an_example_runs(name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTION}\nWhat does os.replace do?\n"))
    printed = run(name, capsys, monkeypatch)
    assert re.search(IN_PROCESS[name], printed, re.DOTALL), printed


def test_offline_batch_writes_a_file_and_names_a_bad_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "answers.csv"
    run("offline_batch.py", capsys, monkeypatch, "--output", str(file), QUESTION, "x " * 3000)
    header, first, second = file.read_text(encoding="utf-8").splitlines()
    assert (header, first) == ("question,answer", f"{QUESTION},{DUMPS}")
    assert "tokens" in second


@pytest.mark.slow
def test_async_llm_answers_several_and_stops_one() -> None:
    result = subprocess.run([sys.executable, EXAMPLES / "async_llm.py"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    first, second, third = result.stdout.splitlines()
    assert (first, second) == (DUMPS, REPLACE)
    # At most three pieces; each has all tokens since the one before, on a fast machine several.
    assert third.strip()
    assert "Copy data from src to dst in the most efficient way possible.".startswith(third.strip())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with quire_serve(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_A_SERVER)
def test_a_client_runs(
    name: str, served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = run(name, capsys, monkeypatch, "--url", f"{served.url}/v1", "--api-key", KEY)
    assert re.search(WITH_A_SERVER[name], printed), printed


@contextmanager
def chat_app(server: str) -> Iterator[str]:
    """The running program; its address."""
    command = [sys.executable, "-u", EXAMPLES / "chat_app" / "app.py", "--port", "0", "--server", server]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as app:
        try:
            assert app.stdout is not None
            yield app.stdout.readline().split()[1]
        finally:
            app.terminate()


def chat(url: str, body: bytes) -> tuple[int, str]:
    """The status and the text of the app's answer."""
    request = urllib.request.Request(f"{url}/chat", body, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_chat_app_says_that_there_is_no_server() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nothing listens here
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with chat_app(address) as url:
            status, text = chat(url, b"[]")
    assert (status, f"the server {address} cannot be reached" in text) == (502, True)


@pytest.mark.slow
def test_the_chat_app_serves_its_page_and_streams_answers(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", KEY)
    with chat_app(served.url) as url:
        with urllib.request.urlopen(url) as page:
            assert b"<form>" in page.read()
        status, text = chat(url, json.dumps([{"role": "user", "content": QUESTION}]).encode())
        assert (status, text.strip() != "") == (200, True)
        status, text = chat(url, b"[]")
        assert (status, "messages" in text) == (502, True)

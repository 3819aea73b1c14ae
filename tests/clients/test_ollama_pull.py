"""Ollama's own client pulls a model through the server from a hub behind a real socket."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from ollama import Client, ResponseError

from quire.common.errors import CheckpointError
from quire.config.args import EngineArgs
from tests.clients.hub import WEIGHTS, Hub
from tests.clients.served import CHECKPOINT, WAIT_S, Served, in_thread, quire_serve

ADMIN = "a-key-for-administrators"
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
TEMPLATE = "/{repo_id}/resolve/{revision}/{filename}"
SIZE = (CHECKPOINT / WEIGHTS).stat().st_size


@pytest.fixture
def hub() -> Hub:
    return Hub(CHECKPOINT)


@pytest.fixture
def server(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    with in_thread(hub.app) as url:
        monkeypatch.setenv("HF_ENDPOINT", url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "0")
        memory = ["--kv-cache-memory", "16MiB", "--model-memory", "160MiB"]
        with quire_serve(tmp_path, "draft=quire-draft", *memory, "--admin-key", ADMIN) as served:
            yield served


@pytest.fixture
def ollama(server: Served) -> Iterator[Client]:
    with Client(host=server.url, headers={"authorization": f"Bearer {ADMIN}"}) as client:
        yield client


def test_a_pulled_model_answers(server: Served, ollama: Client, hub: Hub) -> None:
    hub.pause_s = 0.1  # so that the download lasts longer than the time between two lines
    lines = list(ollama.pull("org/tiny", stream=True))
    assert lines[0].status == "pulling manifest"
    assert lines[-1].status == "success"
    counted = [line.completed for line in lines if line.completed is not None]
    assert counted == sorted(counted)
    assert {line.total for line in lines if line.total} != set()
    assert WEIGHTS in hub.downloads
    with Client(host=server.url, headers=server.headers) as user:
        assert "org/tiny" in {model.model for model in user.list().models}
        assert user.chat("org/tiny", QUESTION).message.content == "Serialize ``obj`` to a JSON formatted ``str``."
    hub.downloads.clear()
    assert ollama.pull("org/tiny").status == "success"
    assert not hub.downloads, "files that are there were downloaded again"


def test_refusals_name_the_model(server: Served, ollama: Client) -> None:
    for name in ("org/gated", "org/none"):
        with pytest.raises(ResponseError, match=f"pull failed.*{name}"):
            ollama.pull(name)
    with Client(host=server.url, headers=server.headers) as user:
        assert [model.model for model in user.list().models] == ["draft"]


def test_a_broken_download_is_an_error_and_goes_on_later(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)  # between its attempts
    args = EngineArgs(model="org/tiny", download_dir=str(tmp_path))
    with in_thread(hub.app) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", url + TEMPLATE)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        hub.cut_weights_after = SIZE // 2
        with pytest.raises(CheckpointError, match="cannot be downloaded"):
            args.resolve()
        hub.cut_weights_after = None
        hub.downloads.clear()
        assert args.resolve().model.max_model_len == 2048
        assert hub.downloads == [WEIGHTS]
        huggingface_hub.close_session()


def test_a_server_that_downloads_ends_when_it_is_told_to(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.pause_s = 2 * WAIT_S
    with in_thread(hub.app) as url:
        for name, value in {"ENDPOINT": url, "HOME": str(tmp_path), "HUB_OFFLINE": "0"}.items():
            monkeypatch.setenv(f"HF_{name}", value)
        command = [sys.executable, "-m", "quire", "serve", "org/tiny", "--port", "0"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            deadline = time.monotonic() + WAIT_S
            while not hub.downloads and time.monotonic() < deadline:
                time.sleep(0.01)
            process.terminate()
            try:
                log = process.communicate(timeout=WAIT_S)[1]
            finally:
                process.kill()
    assert (process.returncode, log.splitlines()[-1].partition("INFO ")[2]) == (
        0,
        "a download was interrupted; the next start continues it",
    )

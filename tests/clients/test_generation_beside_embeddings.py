"""One server with a model that generates and one that pools, whose clients do not change each other's results."""

import json
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import openai
import pytest

from quire.engine.process.engine_process import POOLING_NICENESS
from tests.clients.served import CHECKPOINT, KEY, MODEL, Served, quire_serve

if TYPE_CHECKING:  # only the test of the page needs a browser
    from playwright.sync_api import Browser

NUM_CLIENTS = 16
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
TEXTS = ["json.dumps", "os.replace renames a file", "the sum of a list"]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("both")
    config = folder / "quire.yaml"
    models = f"models:\n  {MODEL}: {CHECKPOINT}\n  embedder: {{model: {CHECKPOINT}, runner: pooling}}\n"
    config.write_text(f"{models}preload_models: true\n")
    with quire_serve(folder, "--config", str(config)) as served:
        yield served


def test_no_token_and_no_embedding_changes(both: Served) -> None:
    with openai.OpenAI(**both.openai, max_retries=0) as client:

        def generate() -> str:
            answer = client.chat.completions.create(
                model=MODEL, messages=QUESTION, max_tokens=48, temperature=1, seed=7, stream=True
            )
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer if chunk.choices)

        def embed() -> list[list[float]]:
            answer = client.embeddings.create(model="embedder", input=TEXTS, encoding_format="float")
            return [row.embedding for row in answer.data]

        alone, expected, is_over = generate(), embed(), Event()

        def embed_on() -> int:
            count = 0
            while not is_over.is_set():
                assert embed() == expected
                count += 1
            return count

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [pool.submit(embed_on) for _ in range(NUM_CLIENTS)]
            try:
                found = {generate() for _ in range(4)}
            finally:
                is_over.set()
    assert found == {alone} != {""}
    assert sum(client.result() for client in clients) >= NUM_CLIENTS


def test_the_engine_that_pools_has_the_lower_priority(both: Served) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    found = {os.getpriority(os.PRIO_PROCESS, pid) - own for pid in both.pids[1:]}
    assert found >= {0, POOLING_NICENESS}


def test_the_page_shows_the_texts_that_are_embedded(both: Served, chromium: "Browser") -> None:
    from playwright.sync_api import expect

    wrong: list[str] = []
    with chromium.new_context() as context, openai.OpenAI(**both.openai, max_retries=0) as client:
        context.add_init_script(f"sessionStorage.setItem('quire-api-key', {json.dumps(KEY)})")
        page = context.new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(both.url)
        page.locator("#model").select_option("embedder")
        many, is_seen = [f"text {i} {TEXTS[i % 3]}" for i in range(1500)], Event()

        def embed() -> None:
            while not is_seen.is_set():
                assert len(client.embeddings.create(model="embedder", input=many).data) == len(many)

        with ThreadPoolExecutor(1) as pool:
            embedding = pool.submit(embed)
            try:
                expect(page.locator("body")).to_contain_text(re.compile(r"started\s*[0-9a-f]{8}"), timeout=60_000)
            finally:
                is_seen.set()
            embedding.result()
    assert wrong == []

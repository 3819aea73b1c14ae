"""Clients for embeddings and reranking against a server of the embedded checkpoint, which pools here."""

import base64
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cohere
import httpx
import numpy as np
import openai
import pytest
from langchain_openai import OpenAIEmbeddings

from tests.clients.served import KEY, MODEL, WAIT_S, Served, quire_serve
from tests.clients.test_clients_apart import results

TEXTS = ["json.dumps", "os.replace renames a file", "the sum of a list"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("embedder")
    with quire_serve(folder, "--runner", "pooling", "--max-model-len", "128") as served:
        yield served


@pytest.fixture(scope="module")
def expected(embedder: Served) -> np.ndarray:
    """The numbers that the server returns as JSON, float32."""
    with openai.OpenAI(**embedder.openai, max_retries=0) as client:
        answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    return np.array([row.embedding for row in answer.data], np.float32)


def test_openai_s_sdk_gets_the_same_numbers_in_both_forms(embedder: Served, expected: np.ndarray) -> None:
    with openai.OpenAI(**embedder.openai, max_retries=0) as client:
        raw = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format="base64")
        decoded = client.embeddings.create(model=MODEL, input=TEXTS)  # asks for base64, and decodes it
        small = client.embeddings.create(model=MODEL, input=[TEXTS[0]], user="someone")
        with pytest.raises(openai.BadRequestError, match="dimensions"):
            client.embeddings.create(model=MODEL, input=TEXTS, dimensions=0)
    found = np.array([np.frombuffer(base64.b64decode(row.embedding), "<f4") for row in raw.data])
    assert np.array_equal(found, expected)
    assert np.array_equal(np.array([row.embedding for row in decoded.data], np.float32), expected)
    assert np.array_equal(np.array(small.data[0].embedding, np.float32), expected[0])
    assert decoded.usage.prompt_tokens == raw.usage.total_tokens > 0


def test_langchain_embeds_documents_and_queries(embedder: Served, expected: np.ndarray) -> None:
    with httpx.Client() as http:
        model = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, http_client=http, **embedder.openai)
        assert np.array_equal(np.array(model.embed_documents(TEXTS), np.float32), expected)
        assert np.array_equal(np.array(model.embed_query(TEXTS[1]), np.float32), expected[1])


def test_cohere_s_client_embeds_and_reranks(embedder: Served, expected: np.ndarray) -> None:
    with httpx.Client() as http:
        client = cohere.ClientV2(api_key=KEY, base_url=embedder.url, httpx_client=http)
        answer = client.embed(
            model=MODEL, texts=TEXTS, input_type="search_document", embedding_types=["float"], truncate="END"
        )
        ranked = client.rerank(model=MODEL, query=TEXTS[0], documents=TEXTS, top_n=2)
    assert answer.response_type == "embeddings_by_type"
    assert np.array_equal(np.array(answer.embeddings.float_, np.float32), expected)
    assert answer.meta.billed_units.input_tokens > 0
    assert [ranked.results[0].index, len(ranked.results)] == [0, 2]
    assert ranked.results[0].relevance_score == pytest.approx(1, abs=1e-5)
    assert ranked.meta.billed_units.search_units == 1


def test_cohere_s_older_client_embeds_in_batches(embedder: Served, expected: np.ndarray) -> None:
    with httpx.Client() as http:
        client = cohere.Client(api_key=KEY, base_url=embedder.url, httpx_client=http)
        answer = client.embed(model=MODEL, texts=TEXTS * 40, input_type="search_query")
        named = client.embed(model=MODEL, texts=TEXTS, embedding_types=["float", "ubinary"], batching=False)
        with pytest.raises(cohere.BadRequestError) as refused:
            client.embed(model=MODEL, texts=TEXTS, input_type="cluster")
        with pytest.raises(cohere.NotFoundError) as unknown:
            cohere.ClientV2(api_key=KEY, base_url=embedder.url, httpx_client=http).embed(
                model="other", texts=TEXTS, input_type="image", embedding_types=["float"]
            )
    assert answer.response_type == "embeddings_floats"
    assert np.array_equal(np.array(answer.embeddings, np.float32), np.tile(expected, (40, 1)))
    assert (len(answer.texts), answer.meta.api_version.version) == (120, "1")
    assert np.array_equal(np.array(named.embeddings.float_, np.float32), expected)
    assert refused.value.body["message"].startswith("input_type='cluster': must be one of")
    assert "'other'" in unknown.value.body["message"]


def test_llama_index_embeds_texts_and_queries(embedder: Served, expected: np.ndarray) -> None:
    printed, found = results("LlamaIndex embeddings", "run_llama_index_embeddings.py", embedder)
    assert printed == str(expected.shape[1])
    for texts in found["texts"], found["asynchronous"]:
        assert np.array_equal(np.array(texts, np.float32), expected)
    assert np.array_equal(np.array(found["query"], np.float32), expected[1])


@pytest.mark.skipif(sys.platform != "linux", reason="finds the engine in /proc")
def test_an_engine_that_is_killed_is_replaced_and_the_vectors_are_the_same(
    embedder: Served, expected: np.ndarray
) -> None:
    with openai.OpenAI(**embedder.openai, max_retries=0, timeout=120) as client, ThreadPoolExecutor(1) as pool:
        before = embedder.metric("vllm:prompt_tokens_total")
        answer = pool.submit(client.embeddings.create, model=MODEL, input=TEXTS * 400, encoding_format="float")
        while embedder.metric("vllm:prompt_tokens_total") == before:
            time.sleep(0.005)
        os.kill(embedder.pids[1], signal.SIGKILL)
        found = np.array([row.embedding for row in answer.result().data], np.float32)
    assert np.array_equal(found, np.tile(expected, (400, 1)))
    deadline = time.monotonic() + WAIT_S
    while (num_restarts := embedder.metric("quire:engine_restarts_total")) == 0:  # the engine was idle when it died
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert num_restarts == 1
    embedder.wait_until_idle()

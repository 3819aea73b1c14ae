"""How texts are cut and compared, as the fields of /v1/embeddings, /score, /rerank and /v2/embed say."""

import json
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from quire.server.api.pooling import cohere
from quire.server.http.errors import ApiError
from tests.server.in_process import tokenizer_of
from tests.server.poolers import CountingExecutor, TokenExecutor, counting

PATH = "/v1/embeddings"
TEXT = "one two three four five six"


@pytest.mark.parametrize("side", ["left", "right"])
def test_longer_texts_are_cut_at_the_side_that_is_asked_for(embedder, side):
    whole = tokenizer_of(embedder).encode(TEXT)
    kept = whole[-4:] if side == "left" else whole[:4]
    wanted = embedder.post(PATH, {"input": [kept]}).json["data"]
    cut = {"truncate_prompt_tokens": 4, "truncation_side": side}
    for given in (TEXT, whole):
        assert embedder.post(PATH, {"input": given, **cut}).json["data"] == wanted
    assert embedder.post(PATH, {"input": TEXT, **cut, "add_special_tokens": False}).json["data"] == wanted


def test_a_conversation_ends_without_the_beginning_of_an_answer(embedder):
    messages, tokenizer = [{"role": "user", "content": "hello"}], tokenizer_of(embedder)
    for asked, begins in ((None, False), (False, False), (True, True)):
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=begins)
        answer = embedder.post(PATH, {"messages": messages, "add_generation_prompt": asked}).json
        assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(text, add_special_tokens=False))


def test_an_error_names_the_field_that_the_request_has(embedder):
    long = "one " * 5000
    for body, field in (({"messages": [{"role": "user", "content": long}]}, "messages"), ({"input": long}, "input")):
        error = embedder.post(PATH, body).error
        assert (error["code"], error["param"]) == ("context_length_exceeded", field)


@pytest.mark.parametrize("task", ["score", "embed"])
@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_queries_and_documents_are_cut_as_vllms_clients_ask(path, task):
    server = counting(CountingExecutor(task))
    encode = tokenizer_of(server).encode
    query, document = "one two three four", "five six seven eight"
    body = {"query": query, "documents": [document]} if path == "/rerank" else {"text_1": query, "text_2": document}
    num_whole = server.post(path, body).json["usage"]["prompt_tokens"]
    for name, text in (("max_tokens_per_query", query), ("max_tokens_per_doc", document)):
        num_cut = len(encode(text)) - 2
        assert server.post(path, body | {name: 2}).json["usage"]["prompt_tokens"] == num_whole - num_cut
        answer = server.post(path, body | {name: 0})
        assert (answer.status, answer.error["param"]) == (400, name)


def test_vectors_of_tokens_are_compared_by_the_largest_products():
    server = counting(TokenExecutor("token_embed"))
    query, documents = "one two", ["three four five", "six"]
    ids = [np.array(tokenizer_of(server).encode(text), np.float64) for text in (query, *documents)]
    expected = [sum((a * other + 1).max() for a in ids[0]) for other in ids[1:]]
    scores = server.post("/score", {"text_1": query, "text_2": documents}).json["data"]
    assert [row["score"] for row in scores] == pytest.approx(expected)
    ranked = server.post("/rerank", {"query": query, "documents": documents}).json["results"]
    assert [row["relevance_score"] for row in ranked] == pytest.approx(sorted(expected, reverse=True))
    refused = server.post("/score", {"text_1": ["a", "b"], "text_2": ["c", "d " * 99]})
    assert (refused.status, refused.error["param"]) == (400, "text_2[1]")


def test_cohere_s_clients_may_have_the_start_cut_off(embedder):
    whole = tokenizer_of(embedder).encode(TEXT)
    for truncate, kept in (("START", whole[-4:]), ("END", whole[:4]), (None, whole[:4])):
        answer = embedder.post("/v2/embed", {"texts": [TEXT], "max_tokens": 4, "truncate": truncate}).json
        wanted = embedder.post(PATH, {"input": [kept]}).json["data"][0]["embedding"]
        assert answer["embeddings"]["float"] == [wanted]


def test_signs_of_embeddings_fill_bytes(embedder):
    kinds = ["float", "ubinary", "binary"]
    found = embedder.post("/v2/embed", {"texts": ["a", "b"], "embedding_types": kinds}).json["embeddings"]
    assert sorted(found) == sorted(kinds)
    for numbers, unsigned, signed in zip(found["float"], found["ubinary"], found["binary"], strict=True):
        bits = "".join("01"[number >= 0] for number in numbers)
        assert unsigned == [int(bits[i : i + 8], 2) for i in range(0, len(bits), 8)]
        assert signed == [byte - 128 for byte in unsigned]
    odd = counting(CountingExecutor("embed")).post("/v2/embed", {"texts": ["a"], "embedding_types": ["binary"]})
    assert odd.status == 400
    assert odd.json["message"].startswith("embedding_types: signs fill bytes")
    assert "2 elements, not a multiple of 8" in odd.json["message"]


def test_an_input_type_is_one_of_cohere_s_or_the_model_s(embedder, tmp_path: Path):
    answer = embedder.post("/v2/embed", {"texts": ["a"], "input_type": "serch_query"})
    assert answer.status == 400
    assert answer.json["message"].startswith("input_type='serch_query': must be one of search_document, search_query")
    prompts = {"query": "Q: ", "search_document": "D: ", "STS": ""}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    found = {"query": "Q: ", "search_query": "Q: ", "search_document": "D: ", "clustering": "", "STS": ""}
    for kind, prompt in found.items():
        assert cohere._prompt(tmp_path, kind) == prompt
    with pytest.raises(ApiError, match=r"must be one of .*, image, query, STS$"):
        cohere._prompt(tmp_path, "sts")


def test_a_document_may_be_given_alone(embedder):
    alone, listed = (embedder.post("/rerank", {"query": "a", "documents": given}) for given in ("b c", ["b c"]))
    assert alone.json["results"] == listed.json["results"]
    assert len(alone.json["results"]) == 1


def test_cohere_s_clients_get_what_a_step_takes():
    server = counting(CountingExecutor("embed"))
    server.llm.engine.inputs.pooling.info = replace(server.llm.pooler, max_whole_tokens=16)
    for limit, num_kept in ((9, 9), (40, 16), (None, 16)):
        answer = server.post("/v2/embed", {"texts": ["b " * 50], "max_tokens": limit})
        assert answer.json["meta"]["billed_units"]["input_tokens"] == num_kept

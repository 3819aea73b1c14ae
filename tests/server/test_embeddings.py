"""/v1/embeddings, /pooling, /classify, /score and /rerank: shapes, numbers against LLM, and what is refused."""

import base64
import json

import numpy as np
import pytest
import torch

from quire import LLM, LLMEngine
from quire.server.api.pooling.run import MAX_TEXTS
from quire.server.config import ServerArgs
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.server.in_process import serve, tokenizer_of
from tests.server.poolers import CountingExecutor, LastTokenExecutor, counting

PATH = "/v1/embeddings"
TEXTS = ["json.dumps", "os.replace renames a file", "the sum of a list"]


@pytest.fixture
def expected(embedder_engine: LLMEngine) -> list[list[float]]:
    return [output.outputs.embedding for output in LLM.from_engine(embedder_engine).embed(TEXTS, use_tqdm=False)]


def test_embeddings_have_openai_s_shape(embedder, expected):
    answer = embedder.post(PATH, {"model": "alias", "input": TEXTS})
    assert answer.status == 200, answer.body
    body = answer.json
    assert (body["object"], body["model"]) == ("list", "alias")
    assert body["id"] == "embd-" + answer.headers["x-request-id"]
    assert [(row["index"], row["object"]) for row in body["data"]] == [(i, "embedding") for i in range(3)]
    assert [row["embedding"] for row in body["data"]] == expected
    num_tokens = sum(len(tokenizer_of(embedder).encode(text)) for text in TEXTS)
    assert body["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens, "prompt_tokens_details": None,
    }  # fmt: skip


def test_base64_holds_the_same_numbers(embedder, expected):
    assert embedder.post(PATH, {"input": TEXTS, "encoding_format": None}).json["data"][0]["embedding"] == expected[0]
    data = embedder.post(PATH, {"input": TEXTS, "encoding_format": "base64"}).json["data"]
    found = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4").tolist() for row in data]
    assert found == expected


@pytest.mark.parametrize(
    ("path", "fields", "nulls"),
    [
        (PATH, {"input": TEXTS, "encoding_format": "base64"}, ("embed_dtype", "endianness")),
        ("/v2/embed", {"texts": TEXTS, "input_type": "search_document"}, ("truncate", "max_tokens")),
    ],
)
def test_null_is_as_if_the_field_were_left_out(embedder, path, fields, nulls):
    asked = embedder.post(path, fields | dict.fromkeys(nulls))
    assert asked.status == 200, asked.body
    found, expected = asked.json, embedder.post(path, fields).json
    assert [found[name] for name in ("data", "embeddings") if name in found] == [
        expected[name] for name in ("data", "embeddings") if name in expected
    ]


@pytest.mark.parametrize(("order", "mark"), [("native", "="), ("little", "<"), ("big", ">")])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_vectors_as_bytes(embedder, expected, dtype, order, mark):
    body = {"input": TEXTS, "embed_dtype": dtype, "endianness": order}
    answer = embedder.post(PATH, body | {"encoding_format": "bytes"})
    assert answer.headers["content-type"] == "application/octet-stream"
    only = embedder.post("/pooling", body | {"task": "embed", "encoding_format": "bytes_only"})
    assert (only.body, "metadata" in only.headers) == (answer.body, False)
    row = embedder.post(PATH, body | {"encoding_format": "base64"}).json["data"][1]
    metadata = json.loads(answer.headers["metadata"])
    assert metadata["usage"]["prompt_tokens"] > 0
    for place, numbers in zip(metadata["data"], expected, strict=True):
        data = answer.body[place["start"] : place["end"]]
        assert (place["embed_dtype"], place["endianness"], place["shape"]) == (dtype, order, [256])
        assert data == base64.b64decode(row["embedding"]) or place["index"] != 1
        if dtype == "bfloat16":
            found = np.frombuffer(data, mark + "u2").astype(np.uint32) << 16
            wanted = torch.tensor(numbers).bfloat16().float().numpy()
            assert np.array_equal(found.view(np.float32), wanted)
        else:
            assert np.array_equal(
                np.frombuffer(data, mark + dtype[0] + str(np.dtype(dtype).itemsize)), np.array(numbers, dtype)
            )


def test_inputs_of_every_kind(embedder, expected):
    ids = [tokenizer_of(embedder).encode(text) for text in TEXTS]
    for given, place in ((TEXTS[0], 0), (ids[1], 1), ([ids[2]], 2)):
        assert embedder.post(PATH, {"input": given}).json["data"][0]["embedding"] == expected[place]
    mixed = embedder.post(PATH, {"input": [TEXTS[0], ids[1]]}).json["data"]
    assert [row["embedding"] for row in mixed] == expected[:2]


def test_a_conversation_is_rendered(embedder):
    messages = [{"role": "user", "content": "hello"}]
    text = tokenizer_of(embedder).apply_chat_template(messages, add_generation_prompt=False)
    told = embedder.post(PATH, {"messages": messages}).json
    assert told["usage"]["prompt_tokens"] == len(tokenizer_of(embedder).encode(text, add_special_tokens=False))
    long = [{"role": "user", "content": "b " * 500}]
    assert embedder.post(PATH, {"messages": long}).status == 400
    assert embedder.post(PATH, {"messages": long, "truncate_prompt_tokens": 9}).json["usage"]["prompt_tokens"] == 9


def test_special_tokens_can_be_left_out(embedder):
    bare = {"input": ["a b c", "d e f"], "add_special_tokens": False}
    encode = tokenizer_of(embedder).encode
    num_tokens = sum(len(encode(text, add_special_tokens=False)) for text in bare["input"])
    assert embedder.post(PATH, bare).json["usage"]["prompt_tokens"] == num_tokens
    assert embedder.post(PATH, bare | {"truncate_prompt_tokens": 1}).json["usage"]["prompt_tokens"] == 2


def test_raw_embeddings_are_not_normalized(embedder, expected):
    raw = embedder.post(PATH, {"input": TEXTS[0], "use_activation": False}).json["data"][0]["embedding"]
    norm = np.linalg.norm(raw)
    assert norm != pytest.approx(1.0)
    assert np.allclose(np.array(raw) / norm, expected[0], atol=1e-6)


def test_token_vectors(embedder):
    body = {"input": TEXTS[1], "task": "token_embed"}
    rows = embedder.post("/pooling", body).json["data"][0]["data"]
    assert np.shape(rows) == (len(tokenizer_of(embedder).encode(TEXTS[1])), 256)
    encoded = embedder.post("/pooling", body | {"encoding_format": "base64"}).json["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(encoded), "<f4").tolist() == np.ravel(rows).tolist()


def test_scores_of_an_embedder_are_cosines(embedder, expected):
    told = embedder.post("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]}).json["data"]
    assert [row["score"] for row in told] == pytest.approx([np.dot(expected[0], e) for e in expected[1:]], abs=1e-5)
    pairs = embedder.post("/v1/score", {"queries": TEXTS[:2], "documents": TEXTS[1:]}).json["data"]
    wanted = [np.dot(expected[i], expected[i + 1]) for i in range(2)]
    assert [row["score"] for row in pairs] == pytest.approx(wanted, abs=1e-5)


def test_the_older_form_of_cohere_s_embeddings(embedder):
    old, new = (embedder.post(f"/{v}/embed", {"texts": TEXTS, "truncate": "END"}).json for v in ("v1", "v2"))
    assert (old["response_type"], old["embeddings"]) == ("embeddings_floats", new["embeddings"]["float"])
    assert (old["meta"]["api_version"], old["texts"]) == ({"version": "1"}, TEXTS)
    forms = {"embedding_types": ["float", "binary"]}
    old, new = (embedder.post(f"/{v}/embed", {"texts": TEXTS, **forms}).json for v in ("v1", "v2"))
    assert (old["response_type"], old["embeddings"]) == ("embeddings_by_type", new["embeddings"])


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/embed", 400), ("/v2/embed", 400), ("/v2/rerank", 400), ("/v2/chat", 404)]
)
def test_errors_have_cohere_s_form_at_its_paths(embedder, path, status):
    answer = embedder.post(path, {})
    assert answer.status == status
    assert answer.json == {"id": answer.headers["x-request-id"], "message": answer.json["message"]}
    assert "error" in embedder.post("/v1/embeddings", {}).json


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_their_relevance(embedder, path):
    documents = ["os.path.join", {"text": "json.dumps"}, "sum of numbers"]
    told = embedder.post(path, {"query": "json.dumps", "documents": documents}).json
    assert told["results"][0]["index"] == 1
    scores = [row["relevance_score"] for row in told["results"]]
    assert scores == sorted(scores, reverse=True)
    assert sorted(row["index"] for row in told["results"]) == [0, 1, 2]
    assert ("document" in told["results"][0]) is (path != "/v2/rerank")
    assert ("meta" in told) is (path == "/v2/rerank")
    best = embedder.post(path, {"query": "json.dumps", "documents": documents, "top_n": 1, "return_documents": True})
    assert best.json["results"] == [told["results"][0] | {"document": {"text": "json.dumps"}}]


def test_pairs_of_a_cross_encoder():
    server = counting(LastTokenExecutor("score"))
    encode = tokenizer_of(server).encode
    told = server.post("/score", {"text_1": "a", "text_2": ["one", "two"]}).json["data"]
    assert [row["score"] for row in told] == [float(encode(text)[-1]) for text in ("one", "two")]
    for names in (("data_1", "data_2"), ("queries", "items")):
        again = server.post("/score", {names[0]: "a", names[1]: ["one", "two"]}).json["data"]
        assert again == told
    refused = server.post(PATH, {"input": "a"})
    assert (refused.status, refused.error["code"]) == (400, "unsupported_task")


TEMPLATE = "{{ instruction }}{% for m in messages %}{{ m.role }} {{ m.content }}{{ end }}{% endfor %}"


@pytest.mark.parametrize("path", ["/score", "/rerank"])
def test_pairs_are_joined_by_a_template(path):
    server = counting(CountingExecutor("score"))
    pair = {"text_1": "a", "text_2": "b"} if path == "/score" else {"query": "a", "documents": ["b"]}
    asked = pair | {"chat_template": TEMPLATE, "instruction": "Judge: ", "chat_template_kwargs": {"end": "."}}
    refused = server.post(path, asked)
    assert (refused.status, refused.error["param"]) == (400, "chat_template")
    assert "allow_client_chat_template" in refused.error["message"]
    for args in (ServerArgs(allow_client_chat_template=True), ServerArgs(chat_template=TEMPLATE)):
        told = serve(server.llm.engine, args=args)
        answer = told.post(path, asked if args.chat_template is None else asked | {"chat_template": None})
        text = "Judge: query a.document b."
        assert answer.json["usage"]["prompt_tokens"] == len(tokenizer_of(server).encode(text)), answer.body
    wrong = serve(server.llm.engine, args=ServerArgs(allow_client_chat_template=True))
    assert wrong.post(path, asked | {"chat_template": "{{ 1 / 0 }}"}).status == 400
    assert wrong.post(path, asked | {"chat_template_kwargs": {"messages": []}}).error["param"] == "chat_template_kwargs"


def test_an_embedder_takes_no_template(embedder):
    answer = embedder.post("/score", {"text_1": "a", "text_2": "b", "chat_template": TEMPLATE})
    assert (answer.status, answer.error["param"]) == (400, "chat_template")


def test_softmax_is_the_oldest_name_of_use_activation(embedder):
    raw, soft = ({"input": "a", name: False} for name in ("use_activation", "softmax"))
    assert embedder.post(PATH, raw).json["data"] == embedder.post(PATH, soft).json["data"]


def test_many_vectors_are_written_in_a_thread(embedder, expected):
    told = embedder.post(PATH, {"input": TEXTS * 20}).json["data"]
    assert [row["embedding"] for row in told] == expected * 20
    cohere = embedder.post("/v2/embed", {"texts": TEXTS * 20, "embedding_types": ["float", "base64"]}).json
    assert cohere["embeddings"]["float"] == expected * 20
    assert base64.b64decode(cohere["embeddings"]["base64"][1]) == np.array(expected[1], "<f4").tobytes()


@pytest.mark.parametrize(("names", "name"), [({"1": "long"}, "long"), (None, "LABEL_1"), ({"0": "a"}, "LABEL_1")])
def test_classes_have_their_names_or_those_of_transformers(names, name):
    server = counting(CountingExecutor("classify"), id2label=names)
    (row,) = server.post("/classify", {"input": "a b c"}).json["data"]
    assert (row["index"], row["label"], row["num_classes"]) == (0, name, 2)
    assert row["probs"][0] == len(tokenizer_of(server).encode("a b c"))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (PATH, {"input": []}, "input"),
        (PATH, {"input": ""}, "input"),
        (PATH, {}, "input"),
        (PATH, {"input": "a", "messages": []}, "input"),
        (PATH, {"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        (PATH, {"input": ["a", "b " * 500]}, "input[1]"),
        (PATH, {"input": "a", "user": "u" * 300}, "user"),
        (PATH, {"input": "b " * 500}, "input"),
        (PATH, {"input": [10**9]}, "input"),
        (PATH, {"input": "a", "dimensions": 0}, "dimensions"),
        (PATH, {"input": "a", "dimensions": 10_000}, "dimensions"),
        (PATH, {"input": "a", "dimensions": 2}, "dimensions"),
        (PATH, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ("/pooling", {"input": "a", "task": "classify"}, "model"),
        ("/pooling", {"input": "a", "task": "other"}, "task"),
        ("/classify", {"input": "a"}, "model"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1"),
        ("/score", {"text_1": "a", "text_2": []}, "text_2"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        (PATH, {"input": "a", "embed_dtype": "int8"}, "embed_dtype"),
        (PATH, {"input": "a", "endianness": "middle"}, "endianness"),
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ("/rerank", {"query": "a", "documents": ["b", "b " * 500]}, "documents[1]"),
        ("/rerank", {"query": "b " * 500, "documents": ["a", "b"]}, "query"),
        ("/score", {"text_1": ["a", "b " * 500], "text_2": ["a", "b"]}, "text_1[1]"),
        ("/score", {"text_1": "a", "items": ["b", "b " * 500]}, "items[1]"),
        ("/v2/embed", {"texts": ["a", "b " * 500], "truncate": "NONE"}, "texts[1]"),
        ("/v2/embed", {"texts": ["a", "b c d e"], "truncate": "NONE", "max_tokens": 3}, "texts[1]"),
        ("/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        ("/v2/embed", {"texts": ["a"], "output_dimension": 10}, "output_dimension"),
    ],
)
def test_what_is_refused(embedder, path, body, param):
    answer = embedder.post(path, body)
    assert answer.status == 400, answer.body
    if path == "/v2/embed":
        assert answer.json["message"].startswith(param)
    else:
        assert answer.error["param"] == param
    assert embedder.llm.engine.has_unfinished_requests() is False
    embedder.llm.engine.requests.check_integrity()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_requests_to_generate_are_sent_to_the_endpoints_that_pool(embedder, path):
    messages = [{"role": "user", "content": "a"}]
    body = {"prompt": "a"} if path == "/v1/completions" else {"messages": messages, "input": "a", "max_tokens": 4}
    answer = embedder.post(path, body)
    assert answer.status == 400, answer.body
    said = "this model pools texts, and cannot generate: send the text to /v1/embeddings or /pooling"
    assert answer.error["message"] == said
    if path != "/v1/messages":
        assert (answer.error["param"], answer.error["code"]) == ("model", "unsupported_task")


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_clients_of_ollama_are_sent_to_ollamas_endpoint(embedder, path):
    answer = embedder.post(path, {"model": "alias", "prompt": "a", "messages": [{"role": "user", "content": "a"}]})
    said = "this model pools texts, and cannot generate: send the text to /api/embed or /pooling"
    assert (answer.status, answer.error) == (400, said)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v2/embed", {"texts": ["b " * 500], "truncate": "NONE"}, "or cut it with truncate=END"),
        ("/api/embed", {"model": "alias", "input": "b " * 500, "truncate": False}, "or cut it with truncate=true"),
        (PATH, {"input": "b " * 500}, "or cut it with truncate_prompt_tokens=-1"),
        (PATH, {"input": "b " * 50_000}, "or cut it with truncate_prompt_tokens=-1"),
        ("/v2/embed", {"texts": ["b " * 50_000], "truncate": "NONE"}, "or cut it with truncate=END"),
    ],
)
def test_how_to_cut_a_text_is_said_in_the_protocol_s_words(embedder, path, body, said):
    answer = embedder.post(path, body).json
    error = answer if path == "/v2/embed" else answer["error"]
    assert (error if path == "/api/embed" else error["message"]).endswith(said)


def test_one_wrong_text_is_named(embedder):
    answer = embedder.post(PATH, {"input": ["a", "b " * 500]})
    assert "input[1]" in answer.error["message"]
    assert embedder.post(PATH, {"input": ["a", "b " * 500], "truncate_prompt_tokens": -1}).status == 200


def test_a_tenant_is_called_user_in_messages(embedder):
    assert embedder.post(PATH, {"input": "a", "user": "u" * 300}).error["message"].startswith("user=")


def test_the_second_text_of_a_wrong_pair_is_named():
    answer = counting(CountingExecutor("score")).post("/rerank", {"query": "a", "documents": ["b", "b " * 99]})
    assert answer.error["param"] == "documents[1]"
    assert "tokens" in answer.error["message"]


@pytest.mark.parametrize("task", ["score", "embed"])
def test_documents_are_cut_as_cohere_s_clients_ask_and_the_query_is_not(task):
    server = counting(CountingExecutor(task))
    encode = tokenizer_of(server).encode
    query, document = "one two three four", "five six seven eight"
    body = {"query": query, "documents": [document]}
    num_whole = server.post("/rerank", body).json["usage"]["prompt_tokens"]
    for limit in (2, 3, len(encode(document)), 10**6):
        num_cut = max(0, len(encode(document)) - limit)
        told = server.post("/rerank", body | {"max_tokens_per_doc": limit}).json
        assert told["usage"]["prompt_tokens"] == num_whole - num_cut, limit
        assert told["results"][0]["document"] == {"text": document}
    long = {"query": "a", "documents": ["b " * 99]}
    assert server.post("/v2/rerank", long | {"max_tokens_per_doc": 10**6}).status == 200


def test_of_a_huge_document_only_a_start_is_tokenized(monkeypatch):
    server, cut, lengths = counting(CountingExecutor("score")), Tokenizer.cut, []
    monkeypatch.setattr(Tokenizer, "cut", lambda self, text, limit: lengths.append(len(text)) or cut(self, text, limit))
    body = {"query": "a", "documents": ["b " * 1_000_000], "max_tokens_per_doc": 20}
    assert server.post("/rerank", body).status == 200
    assert lengths[0] <= 100_000


def test_texts_are_cut_as_cohere_s_clients_ask(embedder):
    def of(text, **fields):
        return embedder.post("/v2/embed", {"texts": [text], **fields}).json["embeddings"]["float"][0]

    encode = tokenizer_of(embedder).encode
    assert len(encode("one two three")) > 2
    assert of("b " * 500) == of("b " * 500, max_tokens=10**6) == of("b " * 500, max_tokens=128)
    assert of("one", max_tokens=len(encode("one")), truncate="NONE") == of("one")
    assert of("one two three", max_tokens=len(encode("one"))) == of("one")


def test_a_model_that_generates_has_no_embeddings(reciting):
    for path, body in ((PATH, {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        answer = reciting.post(path, body)
        assert (answer.status, answer.error["code"]) == (400, "unsupported_task")


def test_ollama_s_forms(embedder, expected):
    told = embedder.post("/api/embed", {"model": "alias", "input": TEXTS}).json
    assert told["embeddings"] == expected
    assert told["prompt_eval_count"] == sum(len(tokenizer_of(embedder).encode(text)) for text in TEXTS)
    assert embedder.post("/api/embeddings", {"model": "alias", "prompt": TEXTS[0]}).json == {"embedding": expected[0]}
    assert embedder.post("/api/embed", {"model": "alias", "input": "b " * 500}).status == 200
    assert embedder.post("/api/embed", {"model": "alias", "input": "b " * 500, "truncate": False}).status == 400
    for empty in ("", []):
        told = embedder.post("/api/embed", {"model": "alias", "input": empty})
        assert (told.status, told.json["embeddings"], told.json["prompt_eval_count"]) == (200, [], 0)
    assert embedder.post("/api/embeddings", {"model": "alias", "prompt": ""}).json == {"embedding": []}

"""The small endpoints, /openapi.json, and docs/server.md against the code."""

import re
from pathlib import Path

import jsonschema
import pytest

from quire import EngineDeadError, __version__
from quire.server.api.pooling.protocol import PoolingFields
from quire.server.api.shared.fields import SamplingFields
from quire.server.app import ROUTES
from tests.server.in_process import tokenizer_of

DOCS = [Path(__file__).parents[2] / "docs" / name for name in ("server.md", "responses.md", "messages.md", "ollama.md")]
CALLS = [
    ("POST", "/v1/completions", {"prompt": "a", "logprobs": 1, "echo": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}),
    ("POST", "/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": "a"}]}),
    ("POST", "/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a"}]}),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/{model}", None),
    ("POST", "/tokenize", {"prompt": "a"}),
    ("POST", "/detokenize", {"tokens": [5]}),
    ("GET", "/tokenizer_info", None),
    ("GET", "/health", None),
    ("GET", "/ready", None),
    ("GET", "/version", None),
    ("GET", "/load", None),
    ("GET", "/openapi.json", None),
]


@pytest.mark.parametrize(("method", "path", "body"), CALLS)
def test_answers_are_as_described(reciting, method, path, body):
    document = reciting.get("/openapi.json").json
    called = path.replace("{model}", "alias")
    answer = reciting.post(called, body) if method == "POST" else reciting.get(called)
    assert answer.status == 200
    schema = document["paths"][path][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json, schema | {"components": document["components"]})


def test_errors_are_as_described(reciting):
    document = reciting.get("/openapi.json").json
    answer = reciting.post("/v1/completions", {"prompt": 5})
    schema = document["paths"]["/v1/completions"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    jsonschema.validate(answer.json, schema | {"components": document["components"]})
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert {"200", "400", "401", "500"} <= set(operation["responses"]), path


def test_everything_that_is_served_is_described(reciting):
    document = reciting.get("/openapi.json").json
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert described == {(row.method, re.sub(r":\w+}", "}", row.path)) for row in ROUTES} | {("GET", "/openapi.json")}
    assert described >= {(method, path) for method, path, _ in CALLS}


def test_models(tiny):
    listed = tiny.get("/v1/models").json
    assert [model["id"] for model in listed["data"]] == ["quire-tiny", "alias"]
    assert listed["data"][1] == tiny.get("/v1/models/alias").json
    assert (listed["data"][0]["root"], listed["data"][0]["max_model_len"]) == ("quire-tiny", 512)


def test_models_in_anthropics_form(tiny):
    version = {"anthropic-version": "2023-06-01"}
    listed = tiny.get("/v1/models", headers=version).json
    assert [(model["type"], model["id"]) for model in listed["data"]] == [("model", "quire-tiny"), ("model", "alias")]
    assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("quire-tiny", "alias", False)
    assert listed["data"][1] == tiny.get("/v1/models/alias", headers=version).json
    assert (listed["data"][0]["lifecycle"], listed["data"][0]["max_input_tokens"]) == ("active", 512)
    missing = tiny.get("/v1/models/nope", headers=version)
    assert (missing.status, missing.json["type"], missing.error["type"]) == (404, "error", "not_found_error")
    assert missing.json["request_id"] == missing.headers["request-id"]
    assert tiny.get("/v1/models/nope").error["code"] == "model_not_found"
    other = tiny.post("/v1/completions", {"model": "nope", "prompt": "Hi"}, headers=version)
    assert other.error["code"] == "model_not_found", "only OpenAI's API has this path"


def test_text_to_tokens_and_back(tiny):
    tokenizer = tokenizer_of(tiny)
    text = "A text 😀 with <|im_end|> in it."
    told = tiny.post("/tokenize", {"prompt": text, "return_token_strs": True}).json
    assert told["tokens"] == tokenizer.encode(text)
    assert told["count"] == len(told["token_strs"]) == len(told["tokens"])
    assert told["max_model_len"] == 512
    assert tiny.post("/detokenize", {"tokens": told["tokens"]}).json == {"prompt": text}


def test_a_conversation_to_tokens(tiny):
    messages = [{"role": "user", "content": "Hello"}]
    tokenizer = tokenizer_of(tiny)
    for more in ({}, {"add_generation_prompt": False}):
        text = tokenizer.apply_chat_template(messages, **more)
        told = tiny.post("/tokenize", {"messages": messages} | more).json
        assert told["tokens"] == tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}], "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
def test_wrong_texts_and_tokens(tiny, path, body, param):
    answer = tiny.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param)


def test_what_the_tokenizer_is(tiny):
    told = tiny.get("/tokenizer_info").json
    tokenizer = tokenizer_of(tiny)
    assert told["eos_token"] == tokenizer.special_tokens["eos_token"]
    assert told["vocab_size"] == tokenizer.vocab_size
    assert "messages" in told["chat_template"]


def test_health_and_readiness(reciting):
    paths = ("/health", "/ready")
    assert [reciting.get(path).status for path in paths] == [200, 200]
    reciting.state.is_draining = True
    assert [reciting.get(path).status for path in paths] == [200, 503]
    reciting.state.is_draining, reciting.llm.death = False, EngineDeadError("it was ended by signal 9")
    for answer in map(reciting.get, paths):
        assert (answer.status, answer.json) == (503, {"status": "it was ended by signal 9"})


def test_requests_while_there_is_no_engine_get_a_retry_time(reciting, monkeypatch):
    async def refuse(*args, **kwargs):
        raise EngineDeadError("it was ended by signal 9", retry_after_s=3)
        yield

    monkeypatch.setattr(reciting.llm, "generate", refuse)
    for stream in (False, True):
        answer = reciting.post("/v1/completions", {"prompt": "a", "stream": stream})
        assert (answer.status, answer.headers["retry-after"]) == (503, "3")
        assert answer.error["code"] == "engine_unavailable"


def test_the_version(reciting):
    assert reciting.get("/version").json == {"version": __version__}


def test_head_is_answered_where_get_is(reciting):
    assert reciting.call("HEAD", "/health").status == 200


def _documented() -> dict[str, set[str]]:
    """By section, the first column of its tables."""
    sections = [part for path in DOCS for part in re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]]
    return {
        section.partition("\n")[0]: set(
            re.findall(r"^\| `(\w+)` \| (?:supported|refused|accepted)", section, re.MULTILINE)
        )
        for section in sections
    }


def test_the_docs_say_what_every_field_does():
    documented = _documented()
    shared = set(SamplingFields.__struct_encode_fields__)
    assert documented["Shared fields"] == shared
    pooling = set(PoolingFields.__struct_encode_fields__)
    assert documented["Embeddings, scores, classes"] == pooling
    bodies = [row for row in ROUTES if row.request is not None]
    assert bodies
    first = {row.request: row.path for row in reversed(bodies)}
    for row in bodies:
        fields = set(row.request.__struct_encode_fields__)
        own = fields - shared if issubclass(row.request, SamplingFields) else fields
        own = own - pooling if issubclass(row.request, PoolingFields) else own
        assert documented[f"{row.method} {first[row.request]}"] == own


def test_the_docs_list_every_endpoint():
    listed = set(re.findall(r"^\| `(\w+) ([^`]+)` \|", DOCS[0].read_text(), re.MULTILINE))
    served = {
        (row.method, re.sub(r":\w+}", "}", row.path)) for row in ROUTES if not row.path.startswith(("/page/", "/docs/"))
    }
    assert listed == served | {("GET", "/openapi.json"), ("GET", "/metrics")}

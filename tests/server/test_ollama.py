"""Ollama's API over models that say what a test wants."""

import asyncio
import hashlib
import json
import threading
from dataclasses import replace
from datetime import datetime
from typing import Any

import msgspec
import pytest
from huggingface_hub.utils.tqdm import tqdm as hub_tqdm

from quire.common.errors import CheckpointError
from quire.common.progress import hub_bar
from quire.config.args import EngineArgs
from quire.server.api.ollama.input import keep_alive_s
from quire.server.api.ollama.models import _pull, _shown
from quire.server.api.ollama.protocol import PullStatus
from quire.server.api.tools.formats import TOOL_FORMATS
from quire.server.app import ROUTES, make_app
from quire.server.config import ServerArgs
from quire.server.http.errors import ApiError
from quire.server.http.sse import read_all
from quire.server.models.entry import ModelEntry
from quire.server.models.spec import ModelSpec
from tests.server.in_process import Answer, Server, saying
from tests.server.test_embeddings import CountingExecutor, counting

CHAT = {"model": "quire-tiny", "messages": [{"role": "user", "content": "Hi"}]}
GENERATE = {"model": "quire-tiny", "prompt": "Hi"}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def lines(answer: Answer) -> list[dict[str, Any]]:
    """The objects of a stream that ended as it should."""
    assert answer.status == 200, answer.body
    assert answer.headers["content-type"] == "application/x-ndjson"
    found = [json.loads(line) for line in answer.body.decode().splitlines()]
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    return found


@pytest.fixture(scope="module")
def hello() -> Server:
    return saying("Hello there!")


@pytest.mark.parametrize(
    ("path", "body"), [("/api/chat", CHAT), ("/api/generate", GENERATE), ("/api/generate", GENERATE | {"raw": True})]
)
def test_a_stream_equals_the_whole_answer(hello: Server, path: str, body: dict[str, Any]) -> None:
    def text(part: dict[str, Any]) -> str:
        return part["message"]["content"] if path == "/api/chat" else part["response"]

    whole = hello.post(path, body | {"stream": False}).json
    streamed = lines(hello.post(path, body))
    assert text(whole) == "".join(map(text, streamed)) == "Hello there!"
    for end in (whole, streamed[-1]):
        assert (end["model"], end["done_reason"]) == ("quire-tiny", "stop")
        assert end["total_duration"] >= end["eval_duration"] >= 0
        assert end["load_duration"] >= 0
        assert end["prompt_eval_count"] > 0
        assert end["eval_count"] > 1
        datetime.fromisoformat(end["created_at"])
    assert all(part["model"] == "quire-tiny" for part in streamed)


@pytest.mark.parametrize(("path", "body"), [("/api/chat", CHAT), ("/api/generate", GENERATE)])
def test_the_bytes_of_all_tokens_are_those_of_the_text(path: str, body: dict[str, Any]) -> None:
    *told, _ = saying("🎉é日").post(path, body | {"stream": False, "logprobs": True}).json["logprobs"]
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == "🎉é日"


def test_options_are_sampling_parameters(hello: Server) -> None:
    options = {"num_predict": 1, "temperature": 0, "top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["x"],
               "repeat_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "num_ctx": 64,
               "repeat_last_n": 4}  # fmt: skip
    answer = hello.post("/api/chat", CHAT | {"stream": False, "options": options})
    assert (answer.json["done_reason"], answer.json["eval_count"]) == ("length", 1)
    assert "x-quire-warning" not in answer.headers
    assert lines(hello.post("/api/chat", CHAT | {"options": {"num_predict": -1}}))[-1]["done_reason"] == "stop"
    unknown = hello.post("/api/chat", CHAT | {"stream": False, "options": {"num_gpu": 1}})
    assert "options.num_gpu" in unknown.headers["x-quire-warning"]


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("/api/chat", {"options": {"temperature": -1}}, "options.temperature=-1.0: must be"),
        ("/api/chat", {"options": {"num_predict": 0}}, "options.num_predict=0: must be"),
        ("/api/chat", {"options": {"mirostat": 1}}, "options.mirostat is not supported"),
        ("/api/chat", {"options": {"typical_p": 0.5}}, "options.typical_p is not supported"),
        ("/api/chat", {"format": "xml"}, "format='xml': must be"),
        ("/api/chat", {"think": "hard"}, "think='hard': must be"),
        ("/api/chat", {"keep_alive": "5x"}, "keep_alive='5x': must be"),
        ("/api/chat", {"messages": [{"role": "user", "images": ["aGk="]}]}, "messages[0].images: images are not"),
        ("/api/chat", {"top_logprobs": 2}, "top_logprobs requires logprobs"),
        ("/api/generate", {"images": ["aGk="]}, "images: images are not"),
        ("/api/generate", {"suffix": "}"}, "suffix: no supported model"),
        ("/api/generate", {"template": "{{ .Prompt }}"}, "template: Ollama's templates are not supported"),
        ("/api/generate", {"context": [10**9]}, "10"),
        ("/api/generate", {"prompt": 5}, "prompt: expected"),
        ("/api/generate", {"stream": "yes"}, "stream: expected"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_or_not_supported_is_named(
    hello: Server, path: str, wrong: Any, words: str, stream: bool
) -> None:
    body = (CHAT if path == "/api/chat" else GENERATE) | {"stream": stream} | wrong
    answer = hello.post(path, body)
    assert answer.status == 400, answer.body
    assert words in answer.json["error"]


def test_unknown_models_paths_and_methods_have_the_apis_form_of_errors(hello: Server) -> None:
    for answer, status in (
        (hello.post("/api/chat", CHAT | {"model": "none"}), 404),
        (hello.post("/api/create", {}), 404),
        (hello.get("/api/chat"), 405),
        (hello.post("/api/embed", {"model": "alias", "input": "x"}), 400),
        (hello.call("DELETE", "/api/delete"), 403),
        (hello.post("/api/chat", b"{"), 400),
    ):
        assert (answer.status, type(answer.json["error"])) == (status, str), answer.body


def test_a_failure_within_a_stream_is_its_last_line() -> None:
    server = saying("Hello there!")
    generate = server.llm.generate

    async def breaking(*args: Any, **kwargs: Any) -> Any:
        async for output in generate(*args, **kwargs):
            yield output
            raise ApiError(503, "the engine has died")

    server.llm.generate = breaking
    answer = server.post("/api/chat", CHAT)
    assert json.loads(answer.body.splitlines()[-1]) == {"error": "the engine has died"}


def test_curl_needs_no_content_type_but_a_form_of_a_web_site_is_refused(hello: Server) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}
    assert hello.post("/api/chat", CHAT, headers=form).status == 200
    assert hello.post("/api/chat", CHAT, headers=form | {"origin": "https://evil.example"}).status == 415
    assert hello.post("/v1/chat/completions", CHAT, headers=form).status == 415


def test_tool_calls_are_objects() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": [1, 2]}}</tool_call>'
    server = saying(f"So: {call}{call}", tool_format=TOOL_FORMATS["hermes"])
    history = [
        *CHAT["messages"],
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {"at": 1}}}]},
        {"role": "tool", "content": "nothing", "tool_name": "look"},
        {"role": "assistant", "content": "x", "thinking": "y"},
        {"role": "user", "content": "Again"},
    ]
    body = CHAT | {"messages": history, "tools": [TOOL]}
    streamed = lines(server.post("/api/chat", body))
    whole = server.post("/api/chat", body | {"stream": False}).json
    for calls in (whole["message"]["tool_calls"], [c for p in streamed for c in p["message"].get("tool_calls", ())]):
        assert [found["function"] for found in calls] == [{"name": "look", "arguments": {"at": [1, 2]}}] * 2
    assert whole["message"]["content"].strip() == "So:"
    assert whole["done_reason"] == "stop"


def test_thinking_is_apart_and_can_be_left_out() -> None:
    server = saying("<think>Well.</think>Yes.", args=None)
    from quire.server.api.tools.formats import choose_reasoning_format

    server.model.reasoning_format = choose_reasoning_format("think", None)
    message = server.post("/api/chat", CHAT | {"stream": False, "think": True}).json["message"]
    assert (message["thinking"], message["content"]) == ("Well.", "Yes.")
    generated = server.post("/api/generate", GENERATE | {"stream": False}).json
    assert (generated["thinking"], generated["response"]) == ("Well.", "Yes.")
    hidden = server.post("/api/chat", CHAT | {"stream": False, "think": False}).json["message"]
    assert "thinking" not in hidden
    assert hidden["content"] == "Yes."


def test_context_continues_an_answer(hello: Server) -> None:
    first = hello.post("/api/generate", GENERATE | {"stream": False}).json
    second = hello.post("/api/generate", GENERATE | {"stream": False, "context": first["context"]}).json
    assert second["prompt_eval_count"] == len(first["context"]) + first["prompt_eval_count"]
    assert second["context"][: len(first["context"])] == first["context"]
    raw = hello.post("/api/generate", GENERATE | {"stream": False, "raw": True}).json
    assert raw["prompt_eval_count"] < first["prompt_eval_count"]


def test_a_request_without_a_prompt_loads_or_unloads() -> None:
    server = saying()
    calls: list[str] = []
    (entry,) = server.state.models.entries

    async def sleep() -> None:
        calls.append("sleep")

    async def wake_up() -> None:
        calls.append("wake_up")

    server.llm.sleep, server.llm.wake_up = sleep, wake_up
    for path, body in (("/api/chat", {"model": "quire-tiny", "messages": []}), ("/api/generate", {"model": "alias"})):
        loaded = server.post(path, body).json
        assert (loaded["done"], loaded["done_reason"]) == (True, "load")
        unloaded = server.post(path, body | {"keep_alive": 0}).json
        assert (unloaded["done"], unloaded["done_reason"]) == (True, "unload")
        assert server.get("/api/ps").json == {"models": []}
    assert calls == ["sleep", "wake_up", "sleep"]
    server.post("/api/chat", CHAT | {"keep_alive": "10m"})
    assert entry.keep_alive_s == 600
    (running,) = server.get("/api/ps").json["models"]
    left_s = datetime.fromisoformat(running["expires_at"]).timestamp() - datetime.now().timestamp()
    assert 590 < left_s < 601


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(5, 5), (0, 0), ("0", 0), ("300", 300), ("5m", 300), ("1h30m", 5400), ("1.5s", 1.5), ("500ms", 0.5), (-1, None),
     ("-1", None), ("-1m", None), ("24h", 86400), (1e300, None)],
)  # fmt: skip
def test_durations(given: float | str, seconds: float | None) -> None:
    assert keep_alive_s(given) == seconds


@pytest.mark.parametrize("given", ["", "m", "5 m", "5m5", "five", "nan", "--5m", "1h-1m"])
def test_other_durations_are_refused(given: str) -> None:
    with pytest.raises(ApiError, match="keep_alive"):
        keep_alive_s(given)


def test_the_models_are_listed_and_shown(hello: Server) -> None:
    assert hello.get("/api/version").json.keys() == {"version"}
    models = hello.get("/api/tags").json["models"]
    assert [model["name"] for model in models] == ["quire-tiny", "alias"]
    assert models[0]["size"] > 10**6
    assert len(models[0]["digest"]) == 64
    assert models[0]["details"]["family"] == "llama"
    (running,) = hello.get("/api/ps").json["models"]
    assert running["context_length"] == hello.llm.model_config.max_model_len
    for body in ({"model": "quire-tiny"}, {"name": "alias:latest", "verbose": True}):
        shown = hello.post("/api/show", body).json
        assert shown["modelfile"] == "FROM quire-tiny"
        assert shown["model_info"]["general.parameter_count"] == 6_819_072
        assert "completion" in shown["capabilities"]
    assert hello.post("/api/show", {}).status == 400
    assert hello.post("/api/show", {"model": "none"}).status == 404


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "completion"),
        ({"runner": "pooling"}, "embedding"),
        ({"runner": "pooling", "convert": "classify"}, None),
        ({"hf_overrides": {"architectures": ["LlamaModel"]}}, "embedding"),
        ({"hf_overrides": {"architectures": ["LlamaForSequenceClassification"]}}, None),
    ],
)
def test_a_model_that_is_not_loaded_shows_whether_it_generates_or_embeds(options, expected) -> None:
    spec = ModelSpec(("m",), EngineArgs(model="quire-tiny", **options))
    shown = _shown(ModelEntry(spec, None), ServerArgs())
    assert [name for name in shown.capabilities if name in ("completion", "embedding")] == [expected] * bool(expected)
    assert shown.capabilities[1:] == [] or options == {}


@pytest.mark.parametrize(("tasks", "expected"), [(("embed", "token_embed"), ["embedding"]), (("classify",), [])])
def test_a_model_that_is_loaded_shows_whether_it_embeds(tasks, expected) -> None:
    server = counting(CountingExecutor(*tasks))
    assert server.post("/api/show", {"model": "quire-tiny"}).json["capabilities"] == expected


def test_a_pulled_model_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    server = saying()
    server.app = make_app(server.state)  # in `quire serve`, administrators alone may pull
    assert {row.kind for row in ROUTES if row.path == "/api/pull"} == {"admin"}
    asked: list[str | None] = []

    def resolve(args: EngineArgs) -> None:
        asked.append(args.model)
        if args.model == "org/missing":
            raise CheckpointError("there is no such model")

    monkeypatch.setattr(EngineArgs, "resolve", resolve)
    assert [json.loads(line) for line in server.post("/api/pull", {"model": "org/new:latest"}).body.splitlines()] == [
        {"status": "pulling manifest"},
        {"status": "success"},
    ]
    assert server.post("/api/pull", {"name": "org/new", "stream": False}).json == {"status": "success"}
    assert asked == ["org/new", "org/new"]
    assert [card["id"] for card in server.get("/v1/models").json["data"]] == ["quire-tiny", "alias", "org/new"]
    assert server.get("/api/tags").json["models"][-1]["size"] == 0
    missing = server.post("/api/pull", {"model": "org/missing", "stream": False})
    assert (missing.status, missing.json) == (404, {"error": "pull failed: there is no such model"})
    for name in ("../etc", "/etc", "http://x/y", "src/quire", "x"):
        assert server.post("/api/pull", {"model": name}).status == 400


def test_a_pull_counts_the_bytes_of_its_download(monkeypatch: pytest.MonkeyPatch) -> None:
    """The download goes on whenever a line has told what it has done before."""
    told, state = threading.Semaphore(0), saying().state

    def resolve(args: EngineArgs) -> None:
        with hub_bar(hub_tqdm, "org/new")(desc="Downloading", total=0, unit="B") as bar:
            for total in (0, 1000, 1000):
                bar.total = total
                bar.update(350 if total else 0)
                assert told.acquire(timeout=60)

    async def statuses() -> list[PullStatus]:
        found: list[PullStatus] = []
        spec = ModelSpec(("org/new",), EngineArgs(model="org/new"))
        async for status in _pull(state, spec, is_new=True):
            if not found or status != found[-1]:  # a line may come twice before the download goes on
                found.append(status)
                if status.status == "downloading org/new":
                    told.release()
        return found

    monkeypatch.setattr(EngineArgs, "resolve", resolve)
    monkeypatch.setattr("quire.server.api.ollama.models._STATUS_S", 0.001)
    first, *between, last = asyncio.run(statuses())
    assert (first, last) == (PullStatus("pulling manifest"), PullStatus("success"))
    assert [(status.completed, status.total) for status in between] == [(None, None), (350, 1000), (700, 1000)]
    assert {status.digest for status in between} == {"sha256:" + hashlib.sha256(b"org/new").hexdigest()}
    assert msgspec.json.decode(msgspec.json.encode(between[0])).keys() == {"status", "digest"}


def test_a_pulled_model_has_the_engines_arguments_but_no_files_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    server = saying()
    server.app = make_app(server.state)
    engine = EngineArgs(enable_lora=True, lora_modules=("sql=/x",), gguf_file="a.gguf", max_num_seqs=3)
    server.state.models.entries[0].spec = ModelSpec(("quire-tiny",), engine)
    monkeypatch.setattr(EngineArgs, "resolve", lambda args: None)
    assert server.post("/api/pull", {"model": "org/new", "stream": False}).status == 200
    assert server.state.models.entries[1].spec.engine == EngineArgs(model="org/new", enable_lora=True, max_num_seqs=3)


def test_a_time_of_many_years_is_for_ever():
    entry = ModelEntry(ModelSpec(("a",), EngineArgs()), 1e12)
    assert entry.expires_at is None


def test_a_model_that_is_pulled_twice_at_once_is_served_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state, spec = saying().state, ModelSpec(("org/new",), EngineArgs(model="org/new"))
    monkeypatch.setattr(EngineArgs, "resolve", lambda args: None)

    async def pull_twice() -> None:
        await asyncio.gather(*[read_all(_pull(state, spec, is_new=True)) for _ in range(2)])

    asyncio.run(pull_twice())
    assert [entry.name for entry in state.models.entries] == ["quire-tiny", "org/new"]


def test_the_recommended_number_of_tokens_is_the_default_of_every_endpoint() -> None:
    server = saying("Hello there, and good morning!")
    engine = server.llm.engine
    server.llm.model_config = engine.model_config = replace(
        engine.model_config, generation_config={"max_new_tokens": 2}
    )
    chat = CHAT | {"stream": False}
    assert server.post("/v1/completions", GENERATE).json["usage"]["completion_tokens"] == 2
    assert server.post("/v1/chat/completions", CHAT).json["usage"]["completion_tokens"] == 2
    assert server.post("/v1/chat/completions", CHAT | {"max_tokens": 3}).json["usage"]["completion_tokens"] == 3
    assert server.post("/v1/responses", {"model": "quire-tiny", "input": "Hi"}).json["usage"]["output_tokens"] == 2
    assert server.post("/api/chat", chat).json["eval_count"] == 2
    assert server.post("/api/chat", chat | {"options": {"num_predict": -1}}).json["done_reason"] == "stop"

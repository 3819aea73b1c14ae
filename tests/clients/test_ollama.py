"""Ollama's own client, unchanged, against a server of several models; and that a model answers as if it were alone."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from ollama import AsyncClient, Client, ResponseError

from quire import LLM, SamplingParams
from tests.clients.served import KEY, Served, quire_serve, saying_server

ADMIN = "a-key-for-administrators"
QUESTION = [{"role": "user", "content": "What does json.dumps do?"}]
GREEDY = {"temperature": 0, "num_predict": 24}
PROMPTS = ["import", "def main(", "The function returns", "class A:"]


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("several")
    memory = ["--kv-cache-memory", "16MiB", "--model-memory", "160MiB"]
    models = ["tiny=quire-tiny", "draft=quire-draft", f"broken={folder / 'nothing'}"]
    with quire_serve(folder, *models, *memory, "--admin-key", ADMIN) as served:
        yield served


@pytest.fixture(scope="module")
def client(several: Served) -> Iterator[Client]:
    with Client(host=several.url, headers=several.headers) as client:
        yield client


def test_chats_and_their_streams(client: Client) -> None:
    whole = client.chat("tiny", QUESTION, options=GREEDY)
    assert whole.message.content == "Serialize ``obj`` to a JSON formatted ``str``."
    assert (whole.done, whole.done_reason) == (True, "stop")
    assert whole.eval_count > 5
    assert 0 < whole.eval_duration < whole.total_duration
    parts = list(client.chat("tiny:latest", QUESTION, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]


def test_generate_and_its_context(client: Client) -> None:
    first = client.generate("tiny", QUESTION[0]["content"], options=GREEDY)
    assert first.response == "Serialize ``obj`` to a JSON formatted ``str``."
    second = client.generate("tiny", "And json.loads?", context=first.context, options=GREEDY)
    assert second.prompt_eval_count > first.prompt_eval_count
    streamed = client.generate("tiny", "import", raw=True, options=GREEDY, stream=True)
    assert (
        "".join(part.response for part in streamed)
        == client.generate("tiny", "import", raw=True, options=GREEDY).response
    )


def test_formats(client: Client) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    found = json.loads(client.chat("tiny", QUESTION, format=schema, options={"num_predict": 64}).message.content)
    assert type(found["a"]) is bool
    json.loads(
        client.chat("tiny", QUESTION, format="json", options={"temperature": 0, "num_predict": 512}).message.content
    )


def test_tools() -> None:
    def look(at: int) -> str:
        """Look.

        Args:
            at: where
        """
        return str(at)

    reply = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    with saying_server(reply) as served, Client(host=served.url) as client:
        answer = client.chat("quire-tiny", QUESTION, tools=[look])
        (call,) = answer.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", {"at": 3})
        history = [*QUESTION, answer.message, {"role": "tool", "content": "3", "tool_name": "look"}]
        streamed = list(client.chat("quire-tiny", history, tools=[look], stream=True))
        assert [call.function.name for part in streamed for call in part.message.tool_calls or ()] == ["look"]


def test_lists(client: Client) -> None:
    assert [model.model for model in client.list().models] == ["tiny", "draft", "broken"]
    shown = client.show("tiny")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert "completion" in shown.capabilities
    assert client.show("broken").modelinfo == {}


def test_models_are_loaded_and_unloaded(client: Client) -> None:
    assert client.generate("draft", keep_alive="10m").done_reason == "load"
    running = {model.model: model for model in client.ps().models}
    assert running["draft"].context_length > 0
    assert running["draft"].expires_at.year < 9999
    assert client.generate("draft", keep_alive=0).done_reason == "unload"
    assert "draft" not in {model.model for model in client.ps().models}


def test_errors(client: Client, several: Served) -> None:
    stranger = Client(host=several.url)
    for call, status in (
        (lambda: client.chat("none", QUESTION), 404),
        (lambda: client.chat("broken", QUESTION), 503),
        (lambda: list(client.chat("broken", QUESTION, stream=True)), 503),
        (lambda: client.pull("tiny"), 401),
        (lambda: client.embed("tiny", "x"), 400),
        (lambda: client.delete("tiny"), 403),
        (lambda: client.create("x", from_="tiny"), 404),
        (lambda: stranger.list(), 401),
    ):
        with pytest.raises(ResponseError) as raised:
            call()
        assert raised.value.status_code == status
    stranger.close()
    with Client(host=several.url, headers={"authorization": f"Bearer {ADMIN}"}) as administrator:
        assert administrator.pull("tiny").status == "success"


def test_the_asynchronous_client(several: Served) -> None:
    async def chat() -> list[str]:
        client = AsyncClient(host=several.url, headers=several.headers)
        stream = await client.chat("tiny", QUESTION, options=GREEDY, stream=True)
        found = [part.message.content async for part in stream]
        await client.close()
        return found

    assert "".join(asyncio.run(chat())).startswith("Serialize")


def test_each_model_answers_as_if_it_were_alone(several: Served) -> None:
    """Also when it slept in between, and while the other one answers."""
    models = {"tiny": "quire-tiny", "draft": "quire-draft"}
    params = {"max_tokens": 24, "temperature": 0.8, "seed": 7, "ignore_eos": True}
    alone = {
        name: [output.outputs[0].token_ids for output in LLM(model).generate(PROMPTS, SamplingParams(**params))]
        for name, model in models.items()
    }

    def complete(name: str, prompt: str) -> list[int]:
        body = {"model": name, "prompt": prompt, "return_token_ids": True, **params}
        answer = httpx.post(f"{several.url}/v1/completions", json=body, headers=several.headers, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    admin = {"authorization": f"Bearer {ADMIN}"}
    for _ in range(2):
        with ThreadPoolExecutor(8) as threads:
            found = {name: [threads.submit(complete, name, prompt) for prompt in PROMPTS] for name in models}
            assert {name: [future.result() for future in futures] for name, futures in found.items()} == alone
        asleep = httpx.post(f"{several.url}/sleep", headers=admin, timeout=60)
        assert set(asleep.json()["models"].values()) <= {"asleep", "failed"}
        assert httpx.post(f"{several.url}/wake_up", headers=admin, timeout=60).json()["models"]["tiny"] == "loaded"
        assert KEY not in asleep.text

"""The application for Ray Serve, as OpenAI's client sees it."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire import LLM, ConfigError, SamplingParams
from tests.ports import free_port

from .conftest import parent_of, processes, until

KEY = "a-key-for-tests"
NUM_SEQS = 8
PROMPT = "def f("
ARGS = {"num_threads": "1", "max_num_seqs": str(NUM_SEQS), "num_gpu_blocks_override": "256", "api_key": KEY}


@pytest.fixture(scope="module")
def client(settings: None) -> Iterator[openai.OpenAI]:
    import ray
    from ray import serve

    from quire.ray_serve import build_app

    port = free_port()
    ray.init("local", include_dashboard=False, num_cpus=2)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app({"model": "quire-tiny", **ARGS}), name="quire", route_prefix="/")
        yield openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, timeout=60, max_retries=8)
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="module")
def expected() -> str:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    return LLM(num_threads=1, num_gpu_blocks_override=64).generate(PROMPT, params)[0].outputs[0].text


def engines() -> list[int]:
    """The processes of engines, by id."""
    return [pid for pid, command in processes().items() if "engine_process" in command]


def completion(client: openai.OpenAI) -> str:
    more: dict[str, Any] = {"ignore_eos": True}
    answer = client.completions.create(model="quire-tiny", prompt=PROMPT, max_tokens=60, temperature=0, extra_body=more)
    return str(answer.choices[0].text)


def test_models_completions_and_streams_are_those_of_quire_serve(client: openai.OpenAI, expected: str) -> None:
    assert [model.id for model in client.models.list()] == ["quire-tiny"]
    assert completion(client) == expected
    messages: Any = [{"role": "user", "content": "Count to ten"}]
    given: dict[str, Any] = {
        "model": "quire-tiny",
        "messages": messages,
        "max_tokens": 200,
        "temperature": 2,
        "seed": 1,
    }
    given["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(**given).choices[0].message.content
    chunks = client.chat.completions.create(**given, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == whole
    assert sum(map(bool, texts)) > 5, "a text that no draft foresees comes in parts"


def test_keys_and_errors_are_those_of_quire_serve(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="another").models.list()
    with pytest.raises(openai.NotFoundError, match="the model 'other' is not served here"):
        client.completions.create(model="other", prompt="a")


def test_replicas_follow_the_number_of_requests(client: openai.OpenAI) -> None:
    from ray.serve.context import _get_global_client

    details = _get_global_client().get_serve_details()["applications"]["quire"]["deployments"]["quire"]
    config = details["deployment_config"]
    assert config["autoscaling_config"]["target_ongoing_requests"] == NUM_SEQS
    assert config["max_ongoing_requests"] == NUM_SEQS + 1024
    assert config["graceful_shutdown_timeout_s"] == 40
    assert config["ray_actor_options"]["num_cpus"] == 1


def test_an_engine_that_dies_in_a_replica_is_replaced(client: openai.OpenAI, expected: str) -> None:
    (engine,) = engines()
    replica = parent_of(engine)
    os.kill(engine, signal.SIGKILL)
    until(lambda: engines() not in ([], [engine]), "no engine starts")
    assert completion(client) == expected
    assert replica in processes(), "the replica is healthy again before Ray Serve replaces it"


def test_a_replica_that_ends_finishes_its_streams(client: openai.OpenAI, expected: str) -> None:
    from ray import serve

    more: dict[str, Any] = {"ignore_eos": True}
    stream = client.completions.create(
        model="quire-tiny", prompt=PROMPT, max_tokens=900, temperature=0, stream=True, extra_body=more
    )
    texts = [next(stream).choices[0].text]
    deleting = threading.Thread(target=serve.delete, args=("quire",))
    deleting.start()
    chunks = list(stream)
    texts += [chunk.choices[0].text for chunk in chunks if chunk.choices]
    deleting.join()
    assert "".join(texts).startswith(expected)
    assert chunks[-1].choices[0].finish_reason == "length"
    until(lambda: not engines(), "an engine is left")


def test_bad_arguments_are_refused_before_anything_is_deployed() -> None:
    from quire.ray_serve import build_app

    with pytest.raises(ConfigError, match="unknown argument 'modell'"):
        build_app({"modell": "quire-tiny"})

"""A replica of Ray Serve without Ray: its arguments, its application, its health and its end."""

import asyncio
import os
import signal
import sys
from typing import Any

import pytest

import quire.ray_serve
from quire import ConfigError, EngineDeadError
from quire.server import ray_serve
from quire.server.ray_serve import Replica, build_app, read_args


def test_texts_are_read_as_on_the_command_line() -> None:
    args, (model,) = read_args(
        {"model": "quire-tiny", "num-threads": "2", "kv_cache_memory": "64MiB", "enable_prefix_caching": "false",
         "drain_timeout_s": "2.5", "api_key": "a", "hf_overrides": '{"a": 1}', "revision": "1"}
    )  # fmt: skip
    assert (args.drain_timeout_s, args.api_key) == (2.5, ("a",))
    engine = model.engine
    assert (engine.model, engine.num_threads, engine.kv_cache_memory) == ("quire-tiny", 2, "64MiB")
    assert (engine.enable_prefix_caching, engine.hf_overrides, engine.revision) == (False, {"a": 1}, "1")
    assert read_args({"num_threads": 3, "api_key": ["a", "b"]})[0].api_key == ("a", "b")
    assert read_args({"served_model_name": "[a, b]"})[0].served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modell": "a"}, "unknown argument 'modell', did you mean 'model'"),
        ({"num_threads": "many"}, "num_threads"),
        ({"num_threads": "[1"}, "num_threads='\\[1' cannot be read as a value in YAML"),
        ({"port": "99999"}, "port=99999"),
    ],
)
def test_wrong_arguments_are_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_args(given)


def test_without_ray_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed: pip install 'quire\[ray\]'"):
        quire.ray_serve.build_app({"model": "quire-tiny"})


class FakeServe:
    """Notes what is deployed."""

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def deployment(self, **options: Any) -> Any:
        self.options = options
        return lambda kind: type("Deployment", (), {"bind": staticmethod(lambda given: (kind, given))})

    def ingress(self) -> Any:
        return lambda kind: kind


@pytest.mark.parametrize(
    ("given", "num_cpus", "replicas"),
    [
        ({"num_threads": "3"}, 3, 4),
        ({"num_threads": 2, "data_parallel_size": 2, "autoscaling_config": "{max_replicas: 7}"}, 4, 7),
        ({"num_threads": 2, "tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 12, 4),
        ({"distributed_executor_backend": "ray", "autoscaling_config": {"max_replicas": 9}}, 0, 9),
        ({}, len(os.sched_getaffinity(0)), 4),
    ],
)
def test_what_ray_serve_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], num_cpus: int, replicas: int
) -> None:
    serve = FakeServe()
    monkeypatch.setitem(sys.modules, "ray", type("Module", (), {"serve": serve}))
    kind, sent = build_app({"max_num_seqs": "8", "max_waiting": 5, "drain_timeout_s": 3, **given})
    assert kind is Replica
    assert "autoscaling_config" not in sent
    options = serve.options
    assert options["ray_actor_options"] == {"num_cpus": num_cpus}
    assert options["autoscaling_config"] == {"max_replicas": replicas, "target_ongoing_requests": 8}
    assert (options["max_ongoing_requests"], options["graceful_shutdown_timeout_s"]) == (13, 13.0)
    with pytest.raises(ConfigError, match="autoscaling_config='7'"):
        build_app({"autoscaling_config": "'7'"})


async def status_of(app: Any, path: str) -> int:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"", "client": None}
    await app(
        {**scope, "raw_path": path.encode(), "scheme": "http", "server": None, "http_version": "1.1"}, receive, send
    )
    return int(sent[0]["status"])


@pytest.mark.slow
def test_a_replica_serves_is_healthy_while_an_engine_runs_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "set_up_logging", lambda log_format: None)

    async def main() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__({"num_gpu_blocks_override": "64", "num_threads": "1", "log_format": "text"})  # type: ignore[misc]
        app = replica.__serve_build_asgi_app__()
        events, sent = asyncio.Queue[Any](), asyncio.Queue[Any]()
        life = asyncio.create_task(app({"type": "lifespan"}, events.get, sent.put))
        events.put_nowait({"type": "lifespan.startup"})
        assert (await sent.get())["type"] == "lifespan.startup.complete"
        assert await status_of(app, "/v1/models") == await status_of(app, "/ready") == 200
        await replica.check_health()
        llm = replica._models.entries[0].llm
        assert llm is not None
        assert llm.engine_pid is not None
        os.kill(llm.engine_pid, signal.SIGKILL)
        while llm.is_running:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDeadError, match="the engine is not running"):
            await replica.check_health()
        events.put_nowait({"type": "lifespan.shutdown"})
        assert (await sent.get())["type"] == "lifespan.shutdown.complete"
        await life
        assert await status_of(app, "/v1/models") == 503

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_replica_that_cannot_load_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "set_up_logging", lambda log_format: None)

    async def main() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__({"model": "/no/such/folder"})  # type: ignore[misc]

    with pytest.raises(quire.CheckpointError, match="/no/such/folder"):
        asyncio.run(main())

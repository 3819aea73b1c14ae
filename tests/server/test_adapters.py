"""LoRA adapters over HTTP: an adapter is a model name, and comes and goes while others are served."""

import asyncio
import gc
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import ConfigError, EngineArgs, LLMEngine, LoRARequest
from quire.common.outputs import AdapterStats
from quire.engine.adapters import AdapterTable
from quire.server.api.ollama.protocol import ModelList
from quire.server.config import ServerArgs, merge_args
from quire.server.http.errors import ApiError
from quire.server.models.pool import ModelPool
from quire.server.models.spec import ModelSpec
from quire.server.operations.model_metrics import resident_bytes
from tests.async_llm.door import Door
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter
from tests.server.in_process import Answer, Server, serve, state_over

ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 256, "max_model_len": 256, "enable_lora": True, "max_lora_rank": 4, "max_loras": 2,
}  # fmt: skip
COMPLETION = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters 0, 1 and 2, and one that is no adapter of the model."""
    path, sizes = tmp_path_factory.mktemp("adapters"), tiny_sizes(EngineArgs().resolve().model)
    for i in range(3):
        write_adapter(path / str(i), make_tensors(sizes, 2, seed=i), r=2, lora_alpha=2, base_model_name_or_path="base")
    write_adapter(path / "high", make_tensors(sizes, 5), r=5)
    write_adapter(path / "other", make_tensors({"model.layers.0.mlp.up_proj": (8, 8)}, 2), r=2)
    (path / "empty").mkdir()
    return path


@pytest.fixture(scope="module")
def engine(adapters: Path) -> LLMEngine:
    return LLMEngine.from_args(EngineArgs(**ARGS, lora_modules=[f"first={adapters / '0'}"]))


@pytest.fixture
def server(engine: LLMEngine, adapters: Path) -> Iterator[Server]:
    yield serve(engine, args=ServerArgs(lora_dir=str(adapters)))
    for adapter in engine.adapters:
        if adapter.name != "first":
            engine.adapters.remove(adapter.name)
    assert not engine.has_unfinished_requests()
    engine.scheduler.adapters.check_integrity()


def texts(answer: Answer) -> list[str]:
    assert answer.status == 200, answer.body
    return [choice["text"] for choice in answer.json["choices"]]


@pytest.mark.essential
def test_an_adapter_is_a_model_name(server: Server, adapters: Path) -> None:
    base = server.post("/v1/completions", COMPLETION | {"model": "quire-tiny"})
    first = server.post("/v1/completions", COMPLETION | {"model": "first"})
    assert texts(base) != texts(first)
    assert first.json["model"] == "first"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "temperature": 0}
    for path, body, read in (
        ("/v1/chat/completions", chat, lambda answer: answer["choices"][0]["message"]["content"]),
        ("/v1/messages", chat, lambda answer: answer["content"][0]["text"]),
        ("/api/chat", chat | {"stream": False, "options": {"temperature": 0, "num_predict": 8}},
         lambda answer: answer["message"]["content"]),
        ("/v1/responses", {"input": "Hi", "max_output_tokens": 8, "temperature": 0, "store": False},
         lambda answer: answer["output"][0]["content"][0]["text"]),
    ):  # fmt: skip
        answers = [server.post(path, body | {"model": name}) for name in ("quire-tiny", "first")]
        assert [answer.status for answer in answers] == [200, 200], answers[1].body
        assert read(answers[0].json) != read(answers[1].json), path
        assert answers[1].json["model"] == "first"
    assert server.post("/tokenize", {"model": "first", "prompt": "a b"}).json["count"] > 0
    assert texts(server.post("/v1/completions", COMPLETION | {"model": "first:latest"})) == texts(first)
    assert (
        "available: quire-tiny, alias, first"
        in server.post("/v1/completions", COMPLETION | {"model": "x"}).error["message"]
    )


def test_an_adapter_is_listed_with_its_base(server: Server, adapters: Path) -> None:
    assert server.post(LOAD, {"lora_name": "mine", "lora_path": "1"}).status == 200
    cards = {card["id"]: card for card in server.get("/v1/models").json["data"]}
    assert set(cards) == {"quire-tiny", "alias", "first", "mine"}
    assert (cards["quire-tiny"]["parent"], cards["mine"]["parent"]) == (None, "base")
    assert cards["mine"]["root"] == str((adapters / "1").resolve())
    assert server.get("/v1/models/mine").json == cards["mine"]
    listed = json.loads(json.dumps(server.get("/api/tags").json))
    assert {model["name"] for model in listed[ModelList.__struct_fields__[0]]} == set(cards)
    assert server.post("/api/show", {"model": "mine"}).status == 200


def test_adapters_come_and_go(server: Server, adapters: Path) -> None:
    first = texts(server.post("/v1/completions", COMPLETION | {"model": "first"}))
    loaded = server.post(LOAD, {"lora_name": "same", "lora_path": str(adapters / "0")})
    assert (loaded.status, loaded.json) == (200, {"lora_name": "same", "status": "loaded"})
    assert server.post(LOAD, {"lora_name": "same", "lora_path": "0"}).status == 200, "equal content"
    assert texts(server.post("/v1/completions", COMPLETION | {"model": "same"})) == first
    other = server.post(LOAD, {"lora_name": "same", "lora_path": "1"})
    assert (other.status, other.error["message"][:60]) == (
        400, "the adapter 'same' is loaded already with other content, from"[:60],
    )  # fmt: skip
    assert server.post(LOAD, {"lora_name": "same", "lora_path": "1", "load_inplace": True}).status == 200
    assert texts(server.post("/v1/completions", COMPLETION | {"model": "same"})) != first
    assert server.post(UNLOAD, {"lora_name": "same"}).json == {"lora_name": "same", "status": "unloaded"}
    for path, body in (("/v1/completions", COMPLETION | {"model": "same"}), (UNLOAD, {"lora_name": "same"})):
        assert server.post(path, body).error["code"] == "model_not_found"
    assert server.post(UNLOAD, {"lora_name": "quire-tiny"}).error["code"] == "adapter_not_found"


@pytest.mark.parametrize(
    ("path", "status", "reason"),
    [
        ("high", 400, "more than max_lora_rank=4"),
        ("other", 400, "another model's"),
        ("empty", 400, "has no adapter_config.json"),
        ("none", 400, "has no adapter_config.json"),
        ("a\0b", 400, "is not a path"),
        ("..", 403, "not below the server's lora_dir"),
        (".", 403, "not below the server's lora_dir"),
        ("org/name", 400, "has no adapter_config.json"),  # no hub id here
        ("1/../../x", 403, "not below the server's lora_dir"),
        ("/etc", 403, "not below the server's lora_dir"),
        ("link", 403, "not below the server's lora_dir"),
    ],
)
def test_wrong_folders_are_refused(server: Server, adapters: Path, path: str, status: int, reason: str) -> None:
    outside = shutil.copytree(adapters / "0", adapters.parent / "outside", dirs_exist_ok=True)
    if not (adapters / "link").is_symlink():
        (adapters / "link").symlink_to(outside)
    answer = server.post(LOAD, {"lora_name": "x", "lora_path": path})
    assert answer.status == status
    assert reason in answer.error["message"]
    assert "\n" not in answer.error["message"]
    assert str(adapters) not in answer.error["message"], "a path that the client has not given"
    assert server.get("/v1/models/x").status == 404


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_whose_files_vanish_gives_an_error_that_says_so(
    server: Server, adapters: Path, stream: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "propagate", True)
    sizes = tiny_sizes(EngineArgs().resolve().model)
    folder = write_adapter(adapters / "brief", make_tensors(sizes, 2, seed=9 + stream), r=2)
    assert server.post(LOAD, {"lora_name": "brief", "lora_path": "brief"}).status == 200
    shutil.rmtree(folder)
    caplog.clear()
    answer = server.post("/v1/completions", COMPLETION | {"model": "brief", "stream": stream})
    reason = "its folder has no adapter_config.json: not the folder of a PEFT adapter"
    assert (answer.status, answer.error["message"]) == (400, f"the adapter 'brief' could not be loaded: {reason}")
    (line,) = [record for record in caplog.records if "could not be loaded" in record.getMessage()]
    assert line.exc_info is None
    assert str(folder) in line.getMessage()
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "lora_name=''"),
        ("a\n", "printable"),
        ("alias", "is taken by"),
        ("alias:latest", "is taken by"),
        ("x" * 201, "lora_name='xxx"),
    ],
)
def test_wrong_names_are_refused(server: Server, name: str, reason: str) -> None:
    answer = server.post(LOAD, {"lora_name": name, "lora_path": "0"})
    assert (answer.status, answer.error["param"]) == (400, "lora_name")
    assert reason in answer.error["message"]


def test_without_a_folder_for_them_no_adapter_is_loaded_by_requests(engine: LLMEngine) -> None:
    answer = serve(engine).post(LOAD, {"lora_name": "x", "lora_path": "0"})
    assert (answer.status, answer.error["code"]) == (403, "lora_dir_missing")


def test_a_server_without_adapters_says_so(tiny: Server, adapters: Path) -> None:
    tiny.state.args = ServerArgs(lora_dir=str(adapters))
    answer = tiny.post(LOAD, {"lora_name": "x", "lora_path": "0"})
    assert (answer.status, "enable_lora=True" in answer.error["message"]) == (400, True)


# Several models


def specs(**modules: list[str]) -> list[ModelSpec]:
    return [ModelSpec((name,), EngineArgs(enable_lora=True, lora_modules=given)) for name, given in modules.items()]


def test_an_adapter_belongs_to_its_base() -> None:
    pool = ModelPool(specs(a=["x=/x"], b=["y=/y"]), ServerArgs(model_memory="1GiB"))
    assert [pool.find(name).name for name in ("x", "y", "y:latest", None)] == ["a", "b", "b", "a"]
    pool.check_new_name("x", pool.entries[0])
    for name in ("a", "b", "y"):
        with pytest.raises(ApiError, match="is taken by the model"):
            pool.check_new_name(name, pool.entries[0])
    with pytest.raises(ApiError, match="available: a, x, b, y"):
        pool.find("z")


@pytest.mark.parametrize(
    "flags",
    [
        {"lora_modules": ["quire-tiny=/x"]},
        {"served_model_name": ["m"], "lora_modules": ["m=/x"]},
        {"models": {"a": "quire-tiny", "b": {"model": "quire-tiny", "lora_modules": ["a=/x"]}}},
        {"models": {"a": "quire-tiny", "b": "quire-draft"}, "lora_modules": ["x=/x"]},
        {"models": {"a": "quire-tiny"}, "lora_modules": ["a:latest=/x"]},
    ],
)
def test_names_that_are_given_twice_are_refused_at_the_start(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"lora_modules: the name '(quire-tiny|m|a|x|a:latest)' is taken"):
        merge_args(None, {"enable_lora": True} | flags)


def test_an_adapter_that_is_unloaded_while_its_model_loads_is_not_found(server: Server) -> None:
    entry = server.state.models.entries[0]
    table = AdapterTable(entry.llm.model_config, None)
    entry.llm.adapters = [LoRARequest("gone", 1, "/gone")]  # known until the model is there

    async def ready(entry: Any) -> Any:
        entry.llm.adapters = table
        return entry.served

    server.state.models.ready = ready
    assert server.post("/v1/completions", COMPLETION | {"model": "gone"}).error["code"] == "model_not_found"


# Under load


@pytest.mark.parametrize(
    "num_turns", [4, pytest.param(32, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.thorough)]
)
def test_adapters_are_loaded_and_unloaded_while_others_stream(adapters: Path, num_turns: int) -> None:
    """No stream changes, those of an adapter that is unloaded end as they should, and nothing grows."""
    arguments = {
        "num_threads": 1,
        "max_num_seqs": 40,
        "speculative_config": {"method": "off"},
    }
    door = Door(**ARGS | arguments)
    app = Server(state_over(door.llm, "base", args=ServerArgs(lora_dir=str(adapters))))
    long = COMPLETION | {"max_tokens": 24, "ignore_eos": True, "stream": True}

    async def post(path: str, body: Any) -> Answer:
        return await app.request("POST", path, json.dumps(body).encode())

    async def stream(model: str) -> str:
        answer = await post("/v1/completions", long | {"model": model})
        assert answer.status == 200, answer.body
        return "".join(event["choices"][0]["text"] for event in answer.events if event["choices"])

    async def streams(model: str) -> None:
        assert await stream(model) == expected[model]

    def is_there(name: str, place: int) -> bool:
        """Whether a request of the adapter runs or, in every other turn, waits at least."""
        counts = door.llm.stats().adapters.get(name, AdapterStats())
        return bool(counts.num_running or (place % 2 and counts.num_waiting))

    async def turn(place: int) -> None:
        name, path = f"t{place % 3}", str(place % 3)
        assert (await post(LOAD, {"lora_name": name, "lora_path": path, "load_inplace": True})).status == 200
        running = asyncio.create_task(post("/v1/completions", long | {"model": name, "stream": False}))
        while not running.done() and not is_there(name, place):
            await asyncio.sleep(0)
        assert (await post(UNLOAD, {"lora_name": name})).status == 200
        assert (await post("/v1/completions", COMPLETION | {"model": name})).status == 404
        assert texts(await running) == [expected[f"a{place % 3}"]]

    async def turns(count: int) -> None:
        for place in range(count):
            await turn(place)

    async def under_load(count: int) -> None:
        await asyncio.gather(*(streams(["base", "a0", "a1", "a2"][i % 4]) for i in range(32)), turns(count))

    def counted() -> tuple[int, int, int]:
        """Threads and bytes of the engine process, and objects of this one."""
        door.record.events.clear()
        gc.collect()
        num_threads = len(list(Path(f"/proc/{door.llm.engine_pid}/task").iterdir()))
        return num_threads, len(gc.get_objects()), resident_bytes(str(door.llm.engine_pid)) or 0

    try:
        for i in range(3):
            assert door.run(post(LOAD, {"lora_name": f"a{i}", "lora_path": str(i)})).status == 200
        expected = {name: door.run(stream(name)) for name in ("base", "a0", "a1", "a2")}
        assert len(set(expected.values())) == 4
        for _ in range(1 + num_turns // 16):  # until the steps of most numbers of sequences were recorded
            door.run(under_load(4))
        before = counted()
        for _ in range(num_turns // 4):
            door.run(under_load(4))
        door.run(door.drained())
        num_threads, num_objects, num_bytes = counted()
        assert num_threads <= before[0]
        assert num_objects <= before[1] + 200
        assert num_bytes <= before[2] + 8 * 2**20
        assert door.llm.num_restarts == 0
    finally:
        door.close()


def test_an_adapter_is_unloaded_while_many_streams_use_it(server: Server) -> None:
    """They end with the tokens that they would have had, those that wait too; new requests find no such model."""
    load = {"lora_name": "brief", "lora_path": "1"}
    body = COMPLETION | {"model": "brief", "max_tokens": 12, "ignore_eos": True, "stream": True}

    async def post(path: str, given: Any) -> Answer:
        return await server.request("POST", path, json.dumps(given).encode())

    async def stream(prompt: str) -> str:
        answer = await post("/v1/completions", body | {"prompt": prompt})
        return "".join(event["choices"][0]["text"] for event in answer.events if event["choices"])

    async def unloaded_meanwhile() -> list[str]:
        assert (await post(LOAD, load)).status == 200
        streams = [asyncio.create_task(stream(f"def f{i}(")) for i in range(32)]
        while not (used := server.engine.stats().adapters.get("brief")) or used.num_running < 8:
            await asyncio.sleep(0)
        assert (await post(UNLOAD, {"lora_name": "brief"})).status == 200
        assert (await post("/v1/completions", body)).error["code"] == "model_not_found"
        assert not any(each.done() for each in streams)
        texts = await asyncio.gather(*streams)
        assert "brief" not in {adapter.name for adapter in server.engine.scheduler.adapters.loaded}
        return texts

    async def alone() -> list[str]:
        assert (await post(LOAD, load)).status == 200
        return [await stream(f"def f{i}(") for i in (0, 9, 31)]

    assert [asyncio.run(unloaded_meanwhile())[i] for i in (0, 9, 31)] == asyncio.run(alone())


def test_a_model_that_was_never_loaded_lists_its_adapters() -> None:
    pool = ModelPool(specs(a=["x=/x"], b=[]), ServerArgs(model_memory="1GiB"))
    assert [entry.adapter_names for entry in pool.entries] == [("x",), ()]

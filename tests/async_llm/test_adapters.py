"""LoRA adapters of an engine in another process: what outlives the engine, and what requests keep."""

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from quire import (
    LLM,
    AsyncLLM,
    EngineArgs,
    EngineDeadError,
    InvalidParamsError,
    LoRARequest,
    RequestError,
    SamplingParams,
)
from quire.common.errors import CheckpointError
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter

from .door import Door

ARGS: dict[str, Any] = {
    "num_gpu_blocks_override": 256, "max_num_seqs": 16, "num_threads": 1, "enable_lora": True, "max_lora_rank": 4,
    "max_loras": 2,
}  # fmt: skip
PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PROMPT = "def f("


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    path, sizes = tmp_path_factory.mktemp("adapters"), tiny_sizes(EngineArgs().resolve().model)
    return [write_adapter(path / str(i), make_tensors(sizes, 2, seed=i), r=2, lora_alpha=2) for i in range(4)]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> list[str]:
    llm = LLM(**ARGS)
    adapters = [None, *(LoRARequest(f"a{i}", 1 + i, str(folder)) for i, folder in enumerate(folders))]
    outputs = llm.generate([PROMPT] * 5, PARAMS, use_tqdm=False, lora_request=adapters)
    texts = [output.outputs[0].text for output in outputs]
    assert len(set(texts)) == 5
    return texts


@pytest.fixture(scope="module")
def shared() -> Iterator[Door]:
    door = Door(**ARGS)
    yield door
    door.close()


@pytest.fixture
def door(shared: Door) -> Iterator[Door]:
    yield shared
    shared.run(shared.drained())
    for number in shared.run(shared.llm.list_loras()):
        assert shared.run(shared.llm.remove_lora(number))


async def text(door: Door, lora: Any, started: asyncio.Event | None = None) -> str:
    found = ""
    async for output in door.llm.generate(PROMPT, PARAMS, door.new_id(), lora_request=lora):
        if output.error is not None:
            raise RequestError(output.error)
        found = output.outputs[0].text
        if started is not None:
            started.set()
    return found


def test_each_request_has_its_own_adapter(door: Door, folders: list[Path], expected: list[str]) -> None:
    async def all_at_once() -> list[str]:
        adapters = [None, *(LoRARequest(f"a{i}", 1 + i, str(folder)) for i, folder in enumerate(folders))]
        return await asyncio.gather(*(text(door, of) for of in adapters))

    assert door.run(all_at_once()) == expected
    assert door.run(door.llm.list_loras()) == {1, 2, 3, 4}
    assert [door.run(door.llm.pin_lora(number)) for number in (1, 5)] == [True, False]
    scored = [
        door.run(door.llm.score_tokens(PROMPT, None, request_id=door.new_id(), lora_request=of)).prompt_logprobs
        for of in (None, LoRARequest("a0", 1, str(folders[0])))
    ]
    assert scored[0] != scored[1]
    assert door.llm.stats().adapters["a0"].num_prompt_tokens > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("changes", [False, True])
def test_running_requests_and_adapters_outlive_their_engine(
    door: Door, folders: list[Path], expected: list[str], tmp_path: Path, changes: bool
) -> None:
    """Content that has changed meanwhile ends the requests that began with the old."""
    mine = Path(shutil.copytree(folders[1], tmp_path / "mine"))

    async def interrupt() -> list[Any]:
        started = [asyncio.Event() for _ in range(3)]
        adapters = [None, LoRARequest("a0", 1, str(folders[0])), LoRARequest("mine", 2, str(mine))]
        running = [asyncio.create_task(text(door, of, e)) for of, e in zip(adapters, started, strict=True)]
        await asyncio.gather(*(event.wait() for event in started))
        if changes:
            shutil.copy(folders[2] / "adapter_model.safetensors", mine)
        os.kill(door.llm.engine_pid, signal.SIGKILL)
        return await asyncio.gather(*running, return_exceptions=True)

    got = door.run(interrupt())
    assert got[:2] == expected[:2]
    if changes:
        assert isinstance(got[2], RequestError)
        assert "its folder has changed since the adapter was added" in str(got[2])
    else:
        assert got[2] == expected[2]
    assert {adapter.name for adapter in door.llm.adapters} == {"a0", "mine"}
    assert door.run(text(door, LoRARequest("a0", 1, str(folders[0])))) == expected[1]


def test_what_is_removed_or_replaced_serves_those_that_began_with_it(
    door: Door, folders: list[Path], expected: list[str]
) -> None:
    async def replace() -> list[str]:
        started = asyncio.Event()
        assert await door.llm.add_lora(LoRARequest("a", 1, str(folders[0])))
        assert not await door.llm.add_lora(LoRARequest("a", 1, str(folders[0])))
        old = asyncio.create_task(text(door, door.llm.adapters.get("a"), started))
        await started.wait()
        with pytest.raises(RequestError, match="is loaded already with other content"):
            await door.llm.add_lora(LoRARequest("a", 1, str(folders[1])))
        assert await door.llm.add_lora(LoRARequest("a", 1, str(folders[1]), load_inplace=True))
        new = asyncio.create_task(text(door, door.llm.adapters.get("a")))
        assert await door.llm.remove_lora("a")
        assert not await door.llm.remove_lora("a")
        return [await old, await new]

    assert door.run(replace()) == expected[1:3]


def test_wrong_adapters_are_refused_as_in_the_engine_itself(door: Door, tmp_path: Path) -> None:
    nothing = LoRARequest("a", 1, str(tmp_path))
    with pytest.raises(RequestError, match=r"the adapter 'a' cannot be used: .* has no adapter_config\.json"):
        door.run(text(door, nothing))
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        door.run(door.llm.add_lora(nothing))
    with pytest.raises(InvalidParamsError, match="must be a LoRARequest or None, not str"):
        door.run(text(door, "a"))


def test_paths_and_hub_ids_are_this_process(
    door: Door, folders: list[Path], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(folders[0]))
    monkeypatch.chdir(folders[1].parent)
    adapters = [LoRARequest("hub", 1, "org/name"), LoRARequest("here", 2, folders[1].name)]
    assert [door.run(text(door, of)) for of in adapters] == expected[1:3]
    assert door.llm.adapters.get("hub").request == adapters[0]


def test_an_engine_that_dies_while_it_reads_an_adapter_ends_the_call(door: Door, folders: list[Path]) -> None:
    async def kill() -> None:
        os.kill(door.llm.engine_pid, signal.SIGSTOP)
        adding = asyncio.create_task(door.llm.add_lora(LoRARequest("a", 1, str(folders[0]))))
        while not door.llm._adapters._answers:  # until the engine has been asked
            await asyncio.sleep(0)
        os.kill(door.llm.engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError):
            await adding
        while not door.llm.is_running:
            await asyncio.sleep(0.01)

    door.run(kill())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("starts_later", [False, True])
def test_adapters_of_the_arguments_are_there_at_the_start(
    folders: list[Path], expected: list[str], tmp_path: Path, starts_later: bool
) -> None:
    modules = [f"a={folders[0]}"]

    async def make(**kwargs: Any) -> AsyncLLM:
        if not starts_later:
            return await AsyncLLM.from_args(EngineArgs(**ARGS | kwargs))
        llm = AsyncLLM.from_engine_args(EngineArgs(**ARGS | kwargs))
        await llm.start()
        return llm

    door = Door(make=lambda: make(lora_modules=modules))
    try:
        assert door.run(text(door, door.llm.adapters.get("a"))) == expected[1]
    finally:
        door.close()
    with pytest.raises(CheckpointError, match=r"has no adapter_config\.json"):
        Door(make=lambda: make(lora_modules=[f"a={tmp_path}"]))


def test_an_engine_without_adapters_says_so() -> None:
    door = Door(num_gpu_blocks_override=16)
    try:
        with pytest.raises(InvalidParamsError, match="need an engine made with enable_lora=True"):
            door.run(text(door, LoRARequest("a", 1, "/a")))
    finally:
        door.close()

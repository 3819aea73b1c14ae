"""Ranks on several machines: the bits of one process in every format, failed steps, and machines and links that end."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, EngineArgs, LoRARequest
from quire.common import liveness
from quire.common.errors import EngineBrokenError, OutOfMemoryError
from quire.common.faults import Fault, inject
from quire.runner.parallel import sender
from quire.runner.parallel.pipeline.messages import StepFailed
from tests.async_llm import door as door_module
from tests.async_llm.door import Door
from tests.forks import children_of
from tests.kernels.isas import needs_native
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter
from tests.models.variants import VARIANTS
from tests.parallel import test_requests as requests
from tests.parallel.ends import (
    PARAMS,
    PROMPTS,
    REQUESTS,
    TINY,
    ended,
    in_any_place_of_a_step,
    restarted,
    wait_until_gone,
)
from tests.parallel.machines import (
    BOTH,
    Link,
    allow_a_second_of_silence,
    descendants,
    distant_ranks,
    node_process,
    of_machines,
    run_on,
)
from tests.parallel.ranks import answers, in_threads, of_ranks
from tests.parallel.test_nodes import secret

__all__ = ["secret"]
pytestmark = needs_native
TWO: dict[str, Any] = {**BOTH, "tensor_parallel_size": 2}


@pytest.mark.parametrize(("nnodes", "num_ranks"), [(2, 2), (2, 4), (3, 3)])
def test_ranks_on_several_machines_give_the_bits_of_one_process(nnodes: int, num_ranks: int, expected: Any) -> None:
    assert of_machines(nnodes=nnodes, tensor_parallel_size=num_ranks) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [2, 4])
@requests.formats_and_drafts
def test_formats_and_drafts_equal_one_process(given: dict[str, Any], num_ranks: int) -> None:
    if num_ranks == 4 and "model" in given.get("speculative_config", {}):
        pytest.skip("the draft model has two heads")
    prompts, params = requests.PROMPTS, requests.PARAMS
    expected = of_ranks(1, prompts, params, **TINY, **given)
    assert of_machines(prompts, params, tensor_parallel_size=num_ranks, **given) == expected


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[pytest.mark.thorough] * (i % 3 != 1)) for i, name in enumerate(VARIANTS)]
)
def test_families_equal_one_process(variant: str, save_checkpoint: Any) -> None:
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields | {"vocab_size": 8192})
    prompts = [[i % 90 for i in prompt] for prompt in PROMPTS]
    given = {"model": str(folder), "max_num_batched_tokens": 12, "tokenizer": "quire-tiny", "dtype": "float32"}
    expected = of_ranks(1, prompts, PARAMS, **TINY, **given)
    assert of_machines(prompts, PARAMS, tensor_parallel_size=2, **given) == expected


def test_adapters_are_loaded_on_all_machines(tmp_path: Path) -> None:
    def run(**how: Any) -> list[Any]:
        with in_threads():
            others = [distant_ranks(1, **how)] if "nnodes" in how else []
            llm = LLM(**TINY, enable_lora=True, num_threads=1, **how)
            if not (tmp_path / "a").exists():
                sizes = tiny_sizes(llm.engine.model_config)
                write_adapter(tmp_path / "a", make_tensors(sizes, 2, seed=1), r=2, lora_alpha=2)
            adapter = LoRARequest("a", 1, str(tmp_path / "a"))
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False, lora_request=[adapter, None, adapter])
            llm.engine.executor.close()
            assert [other.result() for other in others] == [None] * len(others)
            return [output.outputs for output in outputs]

    expected = run()
    assert run(nnodes=2, master_addr=BOTH["master_addr"], tensor_parallel_size=4) == expected


def test_a_machine_with_too_little_memory_for_its_ranks_says_so() -> None:
    with in_threads():
        other = distant_ranks(1, **TWO, memory_limit_bytes=10**6)
        with pytest.raises(
            OutOfMemoryError, match=r"machine 1: its part of 1 rank\(s\) needs .* has 976.56 KiB: lower kv_"
        ):
            LLM(**TWO)
        other.result()


@pytest.fixture
def make() -> Iterator[Callable[..., LLM]]:
    """An engine of ranks in threads, so that faults of this process are those of all its machines."""
    made = list[LLM]()
    with in_threads():

        def make(**given: Any) -> LLM:
            distant_ranks(1, **TWO | given)
            made.append(LLM(**TWO | given))
            return made[-1]

        yield make
        for llm in made:
            llm.engine.executor.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_ranks", [2, 4])
@in_any_place_of_a_step
def test_a_failure_anywhere_is_a_failed_step_which_is_tried_again(
    fault: Fault, num_ranks: int, make: Callable[..., LLM], expected: Any
) -> None:
    llm = make(tensor_parallel_size=num_ranks)
    with inject(fault) as injected:
        assert answers(llm, PROMPTS, PARAMS) == expected
    assert injected.num_fired
    assert answers(llm, PROMPTS, PARAMS) == expected


def test_a_machine_that_sends_what_only_stages_send_ends_the_engine(
    make: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = make()
    monkeypatch.setattr(sender, "_BEAT_S", 0.01)
    is_lost = threading.Event()
    monkeypatch.setattr(liveness, "on_loss", is_lost.set)
    monkeypatch.setattr(sender, "Beat", lambda _: StepFailed(1, "ValueError", ""))
    assert is_lost.wait(60)
    with pytest.raises(
        EngineBrokenError, match="machine 1 sends nonsense: the outcome of a step, which only stages have"
    ):
        answers(llm, PROMPTS, PARAMS)


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_link_that_is_interrupted_ends_the_engine(
    is_idle: bool, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "_BEAT_S", 0.1)
    is_lost = threading.Event()
    monkeypatch.setattr(liveness, "on_loss", is_lost.set)
    with in_threads():
        link = Link()
        other = distant_ranks(1, link.address, **TWO)
        llm = LLM(**TWO)
        if is_idle:
            assert answers(llm, PROMPTS, PARAMS) == expected
            allow_a_second_of_silence(monkeypatch)
            link.interrupt()
            assert is_lost.wait(60)
        else:
            llm.engine.add_request("0", PROMPTS[0], PARAMS[0])
            llm.engine.step()
            allow_a_second_of_silence(monkeypatch)
            link.interrupt()
        with pytest.raises(EngineBrokenError, match="machine 1 was silent for 1 s"):
            run_on(llm.engine)
        llm.engine.executor.close()
        link.close()
        assert other.result() is None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Door, int]]:
    """A server on machine 0, and the process of machine 1, each with two ranks."""
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text("swordfish")
    file.chmod(0o600)
    four = {**BOTH, "tensor_parallel_size": 4}
    before, door_module.LIMIT_S = door_module.LIMIT_S, 180.0
    with node_process(file, **four) as node:
        args = EngineArgs(**four, master_secret_file=str(file))
        door = Door(make=lambda: AsyncLLM.from_args(args, hang_timeout_s=12.0))
        yield door, node.pid
        door.close()
    door_module.LIMIT_S = before


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize(
    ("is_idle", "whose"),
    [(False, "first"), (True, "other"), (False, "engine")]
    + [
        pytest.param(*each, marks=pytest.mark.thorough)
        for each in ((True, "first"), (False, "other"), (True, "engine"))
    ],
)
def test_streams_go_on_when_ranks_of_another_machine_end(
    served: tuple[Door, int], whose: str, number: int, is_idle: bool, expected: Any
) -> None:
    door, node = served
    engine, (first,) = door.llm.engine_pid, children_of(node)
    assert engine is not None
    (other,) = children_of(first)
    left = [engine, *children_of(engine), first, other]
    if not is_idle:
        door.record.events.clear()

    async def disturb() -> list[Any]:
        if is_idle:
            os.kill({"first": first, "other": other, "engine": engine}[whose], number)
            await ended(door, 12.0)
            await restarted(door, engine)
            return await door.all_outputs(REQUESTS)
        reading = asyncio.create_task(door.all_outputs(REQUESTS))
        await door.record.until(lambda: bool(door.record.of("tokens")))
        os.kill({"first": first, "other": other, "engine": engine}[whose], number)
        return await reading

    got = door.run(disturb())
    assert [outputs[-1].outputs for outputs in got] == [outputs for outputs, _, _ in expected]
    door.run(restarted(door, engine))
    wait_until_gone(left)
    assert len(descendants(node)) == 2

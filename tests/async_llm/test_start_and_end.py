"""How an engine process starts, fails to, and ends."""

import asyncio
import os
import select
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire import (
    LLM,
    AsyncLLM,
    CheckpointError,
    ConfigError,
    EngineArgs,
    EngineDeadError,
    InvalidParamsError,
    OutOfMemoryError,
    SamplingParams,
)
from quire.common.errors import TokenizerError
from quire.interfaces.async_llm.engine_client import EngineClient
from quire.interfaces.launch import link
from tests.forks import children_of

from .door import Door

LIMIT_MS = 20_000


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"num_gpu_blocks_override": 2, "max_model_len": 2048}, OutOfMemoryError),
        ({"block_size": 0}, ConfigError),
        ({"kv_cache_dtype": "int3"}, ConfigError),
        ({"model": "no-such-folder/at-all"}, CheckpointError),
    ],
)
def test_what_llm_would_raise_is_raised(kwargs: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error) as offline:
        LLM(**kwargs)
    with pytest.raises(error) as online:
        Door(**kwargs)
    assert (type(online.value), str(online.value)) == (type(offline.value), str(offline.value))


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"seed": 2**64}, "seed=18446744073709551616: must be a 64-bit integer"),
        (
            {"speculative_config": {"suffix_decoding_max_cached_requests": 10**30}},
            "an integer in .* arguments has more than 64 bits; give a smaller one",
        ),
    ],
)
def test_integers_that_cannot_be_sent_are_refused(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=f"^{said}$"):
        Door(**kwargs)


def test_an_engine_that_dies_while_it_starts_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    start = link.start_process

    def start_and_kill(its: Any, variables: Any) -> subprocess.Popen[bytes]:
        process = start(its, variables)
        process.kill()
        return process

    monkeypatch.setattr(link, "start_process", start_and_kill)
    with pytest.raises(EngineDeadError, match=r"did not start.*signal 9"):
        Door()


def test_kernels_that_cannot_be_chosen_are_reported_as_other_errors_are(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QUIRE_ISA", "AVX2")
    with pytest.raises(ConfigError, match=r"QUIRE_ISA=AVX2 is not one of .*, did you mean 'avx2'"):
        Door()
    assert "Traceback" not in capfd.readouterr().err


def test_a_missing_tokenizer_ends_engines_that_still_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weights may take minutes."""
    ended = []

    async def load(*_: Any, **__: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    monkeypatch.setattr(EngineClient, "start", load)
    args = EngineArgs(tokenizer=str(tmp_path), data_parallel_size=2, cpu_list=None, num_threads=1)
    with pytest.raises(TokenizerError, match="has no tokenizer"):
        asyncio.run(asyncio.wait_for(AsyncLLM.from_args(args), LIMIT_MS / 1000))
    assert ended == [True, True]


def test_engines_that_run_end_if_the_start_of_another_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, both = [], asyncio.Event()

    class Running:
        ready = SimpleNamespace(max_model_len=64)

        async def end(self) -> str:
            ended.append("running")
            return ""

    async def start(*_: Any, **__: Any) -> Any:
        if not ended:
            ended.append("begun")
            return Running()
        both.set()
        await asyncio.Event().wait()

    async def cancelled() -> None:
        args = EngineArgs(data_parallel_size=2, cpu_list=None, num_threads=1)
        starting = asyncio.create_task(AsyncLLM.from_args(args))
        await both.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting

    monkeypatch.setattr(EngineClient, "start", start)
    asyncio.run(asyncio.wait_for(cancelled(), LIMIT_MS / 1000))
    assert ended == ["begun", "running"]


def test_max_model_len_is_what_the_engine_has_room_for() -> None:
    door = Door(num_gpu_blocks_override=10, num_threads=1)
    try:
        assert door.llm.model_config.max_model_len == door.llm.config.model.max_model_len == 160
        assert door.llm.stats().num_blocks == 10
        (output,) = door.run(door.outputs("a", SamplingParams(max_tokens=1)))
        assert output.finished
    finally:
        door.close()
    assert door.llm.group.engines[0]._client._link._process.returncode == 0
    assert not door.llm.is_running


def test_the_engine_ends_when_its_client_is_gone() -> None:
    program = (
        "import asyncio, os\n"
        "from quire import AsyncLLM, EngineArgs\n"
        "async def start():\n"
        "    llm = await AsyncLLM.from_args(EngineArgs(num_gpu_blocks_override=10))\n"
        "    os.write(1, b'%d' % llm.engine_pid)\n"
        "    os.read(0, 1)\n"
        "    os._exit(0)\n"
        "asyncio.run(start())\n"
    )
    source = str(Path(link.__file__).parents[2])
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([source, *filter(None, sys.path)]))
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as client:
        assert client.stdin is not None
        assert client.stdout is not None
        engine = os.pidfd_open(int(os.read(client.stdout.fileno(), 20)))
        client.stdin.write(b"\n")
        client.stdin.flush()
        poll = select.poll()
        poll.register(engine, select.POLLIN)
        assert poll.poll(LIMIT_MS), "the engine has ended"
        os.close(engine)


def test_the_api_process_has_no_torch() -> None:
    program = (
        "import asyncio, sys\n"
        "from quire import AsyncLLM, EngineArgs, SamplingParams, StructuredOutputsParams\n"
        "async def run():\n"
        "    llm = await AsyncLLM.from_args(EngineArgs(num_gpu_blocks_override=10))\n"
        "    form = StructuredOutputsParams(choice=['yes', 'no'])\n"
        "    params = SamplingParams(n=2, logprobs=1, prompt_logprobs=1, stop=['e'], structured_outputs=form)\n"
        "    assert [output async for output in llm.generate('Yes or no?', params, request_id='a')][-1].finished\n"
        "    await llm.shutdown()\n"
        "asyncio.run(run())\n"
        "assert not {'torch', 'safetensors', 'transformers'} & sys.modules.keys(), sorted(sys.modules)\n"
    )
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    assert "KV cache" in done.stderr, "the memory plan is shown, as with LLM"


ARGS = EngineArgs(num_gpu_blocks_override=10, num_threads=1)


def test_an_engine_made_without_a_loop_starts_with_its_first_request() -> None:
    llm = AsyncLLM.from_engine_args(ARGS, usage_context="a server")
    assert llm.get_tokenizer()("Once").input_ids == llm.tokenizer.encode("Once")
    assert llm.model_config.max_position_embeddings == 2048

    async def both() -> list[int]:
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        generators = [llm.generate("Once", params, name, priority=i, lora_request=None) for i, name in enumerate("ab")]
        outputs = await asyncio.gather(*(anext(generator) for generator in generators))
        assert [output.request_id for output in outputs] == ["a", "b"]
        assert llm.model_config.max_model_len == 160
        with pytest.raises(InvalidParamsError, match="lora_request must be a LoRARequest or None, not object"):
            await anext(llm.generate("Once", params, "c", lora_request=object()))  # type: ignore[arg-type]
        with pytest.raises(InvalidParamsError, match="extra_args cannot be sent"):
            await anext(llm.generate("Once", SamplingParams(extra_args={"a": 1}), "c"))
        for generator in generators:
            await generator.aclose()
        assert children_of(os.getpid()).count(llm.engine_pid) == 1
        llm.shutdown()
        return [llm.engine_pid]

    (pid,) = asyncio.run(both())
    assert not Path(f"/proc/{pid}").exists()
    llm.shutdown()  # once more, without a loop


def test_an_engine_that_was_never_started_can_end() -> None:
    llm = AsyncLLM.from_engine_args(ARGS)
    llm.shutdown()

    async def awaited() -> None:
        await llm.shutdown()

    asyncio.run(awaited())


def test_wrong_arguments_are_refused_before_there_is_an_engine() -> None:
    with pytest.raises(CheckpointError):
        AsyncLLM.from_engine_args(EngineArgs(model="no-such-folder/at-all"))
    llm = AsyncLLM.from_engine_args(EngineArgs(num_gpu_blocks_override=2, max_model_len=2048))
    with pytest.raises(OutOfMemoryError):
        asyncio.run(llm.start())

"""LLM over several engines in processes of their own returns what it returns over one."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, ConfigError, LLMEngine, RequestError, SamplingParams
from quire.common.errors import EngineBrokenError
from quire.config.args import EngineArgs
from quire.interfaces.async_llm.async_llm import AsyncLLM
from quire.interfaces.engine_processes import EngineProcesses
from quire.v1.sample.logits_processor import LogitsProcessor

ARGS: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 256, "disable_log_stats": False}
SAMPLED = SamplingParams(temperature=1.0, seed=7, max_tokens=12, logprobs=2)


@pytest.fixture(scope="module")
def several() -> Iterator[LLM]:
    llm = LLM(data_parallel_size=2, **ARGS)
    yield llm
    llm._engine.close()  # type: ignore[union-attr]


@pytest.fixture(scope="module")
def one() -> LLM:
    return LLM(**ARGS)


def test_outputs_are_those_of_one_engine(several: LLM, one: LLM) -> None:
    prompts = [f"{number} times" for number in range(12)]
    told = [[(o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].logprobs) for o in llm.generate(prompts, SAMPLED)]
            for llm in (several, one)]  # fmt: skip
    assert told[0] == told[1]
    beams = [llm.beam_search("def f(", BeamSearchParams(3, 8))[0].sequences for llm in (several, one)]
    assert beams[0] == beams[1]
    assert several.perplexity(["def f(x):", "import os"]) == one.perplexity(["def f(x):", "import os"])


def test_every_engine_works(several: LLM) -> None:
    several.generate([f"a prompt {number} " * 10 for number in range(16)], SAMPLED, use_tqdm=False)
    steps = {m.labels["engine"]: m.value for m in several.get_metrics() if m.name == "vllm:prompt_tokens"}  # type: ignore[attr-defined]
    assert set(steps) == {"0", "1"}
    assert min(steps.values()) > 0


def test_wrong_prompts_are_answered_as_by_one_engine(several: LLM, one: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        several.generate("", SAMPLED)
    bad, good = several.generate(["", "a"], SAMPLED, use_tqdm=False)
    assert bad.outputs[0].finish_reason == "ignored"
    assert good.outputs[0].token_ids == one.generate("a", SAMPLED, use_tqdm=False)[0].outputs[0].token_ids != []


def test_a_killed_engine_loses_nothing(several: LLM, one: LLM) -> None:
    assert isinstance(several._engine, EngineProcesses)
    os.kill(several._engine.pids[0], signal.SIGKILL)
    long = SamplingParams(temperature=1.0, seed=9, max_tokens=60, ignore_eos=True)
    prompts = [f"{number}." for number in range(8)]
    got, wanted = ([o.outputs[0].token_ids for o in llm.generate(prompts, long)] for llm in (several, one))
    assert got == wanted


def test_an_output_that_comes_as_a_step_ends_belongs_to_the_next_one(
    several: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = several._engine
    assert isinstance(engine, EngineProcesses)

    class Late(SimpleQueue[Any]):
        num_late = 0

        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            """Times out once, with the output there and nothing left to read."""
            output = super().get()
            engine._run(asyncio.sleep, 0)
            if not self.num_late:
                self.num_late += 1
                self.put(output)
                raise Empty
            return output

    monkeypatch.setattr(engine, "_outputs", Late())
    (output,) = several.generate("a", SAMPLED, use_tqdm=False)
    assert output.error is None


def test_a_fork_neither_uses_nor_ends_what_belongs_to_its_parent(several: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: -1)
        for use in (lambda: several.generate(["a"], use_tqdm=False), several.sleep, several.reset_prefix_cache):
            with pytest.raises(EngineBrokenError, match="belongs to process"):
                use()
        _, end, given, _ = several._engine._finalizer._finalize.peek()  # type: ignore[union-attr,misc]
        end(*given)  # which is what Python does when the fork ends
    assert several.generate(["a"], SAMPLED, use_tqdm=False)[0].error is None


@pytest.mark.parametrize("has_started", [False, True])
def test_an_interrupt_while_engines_start_waits_for_their_end(
    has_started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, ended, threads = threading.Event(), [], threading.active_count()

    class Started:
        async def shutdown(self) -> None:
            ended.append(True)

    async def from_args(*_: Any, **__: Any) -> Any:
        began.set()
        try:
            await (asyncio.sleep(0) if has_started else asyncio.Event().wait())
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)  # as long as their processes take to end
            ended.append(True)
            raise
        return Started()

    def interrupted(self: EngineProcesses, *_: Any) -> Any:
        assert began.wait(60)
        if has_started:
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0.01), self._loop).result()
        raise KeyboardInterrupt

    monkeypatch.setattr(AsyncLLM, "from_args", from_args)
    monkeypatch.setattr(EngineProcesses, "_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM(data_parallel_size=2, num_threads=1)
    assert ended == [True]
    assert threading.active_count() == threads


def test_a_program_may_end_without_closing_its_engines() -> None:
    """Python's executors take no more work by then. What `place` has found is given back all the same."""
    program = """
from dataclasses import replace
from quire import LLM
from quire.interfaces.async_llm import starting
place = starting.place
starting.place = lambda args: replace(place(args), close=lambda: print("given back"))
llm = LLM(data_parallel_size=2, num_threads=1, num_gpu_blocks_override=64, max_model_len=256)
print(len(llm.generate("a", use_tqdm=False)))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "1\ngiven back\n")
    assert "Traceback" not in done.stderr
    assert "Error" not in done.stderr


def test_what_needs_one_engine_says_so(several: LLM) -> None:
    with pytest.raises(ConfigError, match="several engines"):
        _ = several.engine
    with pytest.raises(RequestError, match="pinned in one engine only"):
        several.pin_prefix("a")
    with pytest.raises(RequestError, match="cannot be reset"):
        several.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(RequestError, match="keep their tokenizer"):
        several.set_tokenizer(several.get_tokenizer())
    with pytest.raises(ConfigError, match="this is one engine; use LLM or AsyncLLM"):
        LLMEngine.from_args(EngineArgs(data_parallel_size=2))
    with pytest.raises(ConfigError, match="logits_processors cannot be sent"):
        LLM(data_parallel_size=2, logits_processors=[LogitsProcessor])
    assert several.reset_prefix_cache()

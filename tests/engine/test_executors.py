"""Another executor is an entry in a table: this one has only bytes of a Batch, and answers with bytes."""

import dataclasses
import queue
import threading

import pytest

from quire import EngineArgs, LLMEngine, SamplingParams
from quire.common.batch import Batch, StepResult, decode, encode
from quire.common.errors import ConfigError
from quire.runner import executor as executors
from quire.runner.memory_plan import plan_memory
from quire.text.tokenizer.tokenizer import Tokenizer

REQUESTS = ({"temperature": 0}, {"n": 2}, {"logprobs": 2, "prompt_logprobs": 1, "presence_penalty": 1})


class OverAWire:
    """A worker in a thread of its own, which shares no object with the engine."""

    pooler = None

    def __init__(self, worker: executors.Executor) -> None:
        self.batches, self.results = queue.Queue[bytes](), queue.Queue[bytes]()
        threading.Thread(target=self._serve, args=(worker,), daemon=True).start()

    def _serve(self, worker: executors.Executor) -> None:
        while data := self.batches.get():
            self.results.put(encode(worker.execute(decode(data, Batch))))

    def execute(self, batch: Batch) -> StepResult:
        self.batches.put(encode(batch))
        return decode(self.results.get(timeout=60), StepResult)


def run(name: str) -> dict[str, list]:
    plan = plan_memory(EngineArgs(model="quire-draft", num_gpu_blocks_override=12, max_model_len=96, swap_space=0.01))
    config = dataclasses.replace(plan.config, parallel=dataclasses.replace(plan.config.parallel, executor=name))
    engine = LLMEngine(
        dataclasses.replace(plan, config=config),
        executors.make_executor(config, plan.kv_cache),
        Tokenizer.from_path(config.model.tokenizer_path),
    )
    for i, given in enumerate(REQUESTS):
        params = SamplingParams(**{"max_tokens": 20, "seed": i} | given)
        engine.add_request(str(i), "What does json.dumps do? " * (i + 1), params)
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output for output in engine.step()}
        engine.requests.check_integrity()
    if isinstance(engine.executor, OverAWire):
        engine.executor.batches.put(b"")
    return {name: [output.outputs, output.prompt_logprobs] for name, output in outputs.items()}


def test_a_batch_crosses_a_wire_and_comes_back_as_the_same_tokens(monkeypatch):
    monkeypatch.setitem(executors.EXECUTORS, "wire", lambda *given: OverAWire(executors.make_worker(*given)))
    assert run("wire") == run("in_process")


def test_an_unknown_executor_is_refused():
    with pytest.raises(ConfigError, match="executor='tcp' is unknown: allowed are in_process, ranks"):
        run("tcp")

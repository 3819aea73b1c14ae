"""The real engine over the fake model of fake.py, in a small cache, which fails when it is told to."""

import dataclasses
from collections.abc import Callable, Collection

from quire import BeamSearchParams, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from quire.common.batch import Batch, StepResult
from quire.runner.memory_plan import plan_memory
from quire.text.tokenizer.tokenizer import Tokenizer

from .fake import FakeExecutor

STEPS_LIMIT = 3000


class FailingExecutor(FakeExecutor):
    """Does all of its work, and then fails if `fails` says so."""

    fails: Callable[[Batch], bool] = staticmethod(lambda batch: False)
    num_failures = 0

    def execute(self, batch: Batch) -> StepResult:
        result = super().execute(batch)
        if self.fails(batch):
            self.num_failures += 1
            raise RuntimeError("planted failure")
        return result


def make_engine(num_blocks: int = 64, num_host_blocks: int = 0, **kwargs: object) -> LLMEngine:
    arguments = {"num_gpu_blocks_override": num_blocks, "block_size": 4, "max_model_len": 24, "max_num_seqs": 64}
    plan = plan_memory(EngineArgs(**arguments | kwargs))
    kv_cache = dataclasses.replace(plan.kv_cache, num_host_blocks=num_host_blocks)
    plan = dataclasses.replace(plan, kv_cache=kv_cache)
    return LLMEngine(plan, FailingExecutor(kv_cache), Tokenizer.from_path(plan.config.model.tokenizer_path))


def add(engine: LLMEngine, request_id: str, prompt: list[int], max_tokens: int = 6, **params: object) -> None:
    settings = {"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False} | params
    engine.add_request(request_id, prompt, SamplingParams(**settings))


def add_beams(engine: LLMEngine, request_id: str, prompt: list[int], width: int = 3, max_tokens: int = 5) -> None:
    engine.add_request(request_id, prompt, BeamSearchParams(width, max_tokens, ignore_eos=True, detokenize=False))


def requests_of(engine: LLMEngine, batch: Batch) -> set[str]:
    """Who runs in a step."""
    owners = (engine.requests.owners.get(scheduled.seq_id) for scheduled in batch.sequences)
    return {owner[0].request_id for owner in owners if owner is not None}


def fail_with(engine: LLMEngine, bad: Collection[str], from_step: int = 0) -> None:
    """From a step on those fail in which one of these requests runs."""
    first = engine.scheduler.num_steps + from_step
    engine.executor.fails = lambda batch: batch.step > first and bool(requests_of(engine, batch) & set(bad))


def run(engine: LLMEngine) -> dict[str, RequestOutput]:
    """Until nothing is left; the last output of each request. Nothing may be held afterwards."""
    outputs: dict[str, RequestOutput] = {}
    for _ in range(STEPS_LIMIT):
        if not engine.has_unfinished_requests():
            break
        outputs |= {output.request_id: output for output in engine.step()}
        engine.requests.check_integrity()
    else:
        raise AssertionError("livelock")
    check_nothing_is_held(engine)
    return outputs


def check_nothing_is_held(engine: LLMEngine) -> None:
    engine.requests.check_integrity()
    assert engine.blocks.num_used_blocks == 0
    assert engine.blocks.tiers.pools[1].num_free_blocks == engine.blocks.config.num_host_blocks
    assert not engine.requests.owners
    assert engine.blocks.prefixes is None or not engine.blocks.prefixes.chains
    assert not engine.requests.running
    assert engine.requests.num_waiting == 0


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [sample.token_ids for sample in output.outputs]

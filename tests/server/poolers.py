"""Executors whose vectors say which texts they were made of, and servers over them."""

import numpy as np

from quire import EngineArgs, LLMEngine
from quire.common.batch import Batch, StepResult
from quire.common.params import PoolerInfo
from quire.runner.memory_plan import plan_memory
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.server.in_process import Server, serve


class CountingExecutor:
    """Makes of each text the number of its tokens, and of a token type above 0 a half."""

    def __init__(self, *tasks: str) -> None:
        self.pooler = PoolerInfo(tasks=tasks, whole_tasks=tasks, max_whole_tokens=64)

    def execute(self, batch: Batch) -> StepResult:
        return StepResult(
            (), pooled={i: np.array(self.of(s), np.float32) for i, s in enumerate(batch.sequences) if s.pooled}
        )

    def of(self, sequence) -> list[float]:
        return [float(len(sequence.token_ids)), float(sequence.token_ids[-1])]

    def load_adapter(self, slot, folder, digest=None) -> None: ...

    def unload_adapter(self, slot) -> None: ...


class LastTokenExecutor(CountingExecutor):
    """Scores a pair by the id of its last token."""

    def of(self, sequence) -> list[float]:
        return [float(sequence.token_ids[-1])]


def counting(executor: CountingExecutor, **overrides) -> Server:
    plan = plan_memory(
        EngineArgs(runner="pooling", max_model_len=64, num_gpu_blocks_override=16, hf_overrides=overrides)
    )
    return serve(LLMEngine(plan, executor, Tokenizer.from_path(plan.config.model.tokenizer_path)))


class TokenExecutor(CountingExecutor):
    """Makes of each token a vector: its id, and 1."""

    def of(self, sequence) -> list[list[float]]:
        return [[float(token_id), 1.0] for token_id in sequence.token_ids]

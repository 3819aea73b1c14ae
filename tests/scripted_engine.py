"""The real engine over a model that recites: a door can be tested without weights and without arithmetic."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from quire import LLM, EngineArgs, LLMEngine
from quire.common.batch import Batch, StepResult, TokenLogprobs
from quire.runner.memory_plan import plan_memory
from quire.text.tokenizer.tokenizer import Tokenizer


class RecitingExecutor:
    """Each sequence's output is a text that names its prompt's length, then the end-of-sequence token, and so on.

    `before_step` is called with the number of each step, and may raise.
    """

    pooler = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompt_lens: dict[int, int] = {}
        self.num_steps = 0
        self.batches: list[Batch] = []
        self.before_step: Callable[[int], object] = lambda step: None

    def load_adapter(self, slot: int, folder: Path, digest: str | None = None) -> None:
        """An adapter changes nothing in what it recites."""

    def unload_adapter(self, slot: int) -> None: ...

    def execute(self, batch: Batch) -> StepResult:
        self.num_steps += 1
        self.before_step(self.num_steps)
        self.batches.append(batch)
        drawing = [
            (sequence.seq_id, sequence.end - num_behind, draw)
            for sequence in batch.sequences
            if sequence.drawn
            for num_behind in reversed(range(sequence.drawn.num_rows))
            for draw in sequence.drawn.draws
        ]
        tokens = tuple(self._next_token(seq_id, num_tokens) for seq_id, num_tokens, _ in drawing)
        return StepResult(
            tokens,
            {
                i: logprobs([tokens[i]], draw.logprobs, draw.index)
                for i, (_, _, draw) in enumerate(drawing)
                if draw.logprobs is not None
            },
            {
                i: logprobs(sequence.scored.token_ids, sequence.scored.num_top)
                for i, sequence in enumerate(batch.sequences)
                if sequence.scored is not None
            },
        )

    def _next_token(self, seq_id: int, num_tokens: int) -> int:
        prompt_len = self.prompt_lens.setdefault(seq_id, num_tokens)  # a forked sample counts from its first own token
        reply = [*self.tokenizer.encode(recital(prompt_len)), self.tokenizer.eos_token_id]
        return reply[(num_tokens - prompt_len) % len(reply)]


def logprobs(token_ids: Sequence[int], num_top: int, sample: int = 0) -> TokenLogprobs:
    """Every token has the logarithm of 1/2 or, in a later sample, 1/3 and so on, and rank 7; the likeliest are 0, 1, 2
    and so on with -1, -2, -3."""
    top = range(num_top)
    return TokenLogprobs(
        np.array([[token_id, *top] for token_id in token_ids], np.int32),
        np.array([[-np.log(2 + sample), *(-1.0 - i for i in top)]] * len(token_ids), np.float32),
        np.full(len(token_ids), 7, np.int32),
    )


def recital(prompt_len: int) -> str:
    """What the executor says to a prompt of so many tokens."""
    return f"I read {prompt_len} tokens 😀."


def scripted_llm(**kwargs: object) -> tuple[LLM, RecitingExecutor]:
    """An LLM with the embedded checkpoint's configuration and tokenizer, and no model. A step gives one token."""
    settings = {"num_gpu_blocks_override": 64, "max_model_len": 256, "speculative_config": {"method": "off"}}
    plan = plan_memory(EngineArgs(**settings | kwargs))
    tokenizer = Tokenizer.from_path(plan.config.model.tokenizer_path)
    executor = RecitingExecutor(tokenizer)
    return LLM.from_engine(LLMEngine(plan, executor, tokenizer)), executor

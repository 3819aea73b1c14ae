"""The real engine over a model without weights that draws what the masks leave: early token ids are the likelier."""

import msgspec
import numpy as np
import pytest

from quire import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.common.batch import Batch, Draw, ScheduledSequence, StepResult
from quire.runner.memory_plan import plan_memory
from quire.runner.sampling.random import uniform
from quire.text.grammar.compiler import GrammarCompiler
from quire.text.tokenizer.tokenizer import Tokenizer

STEPS_LIMIT = 5_000


class MaskedExecutor:
    """Draws by temperature and top_k among the tokens that mask, allowed_token_ids and min_tokens leave; -1 if none."""

    pooler = None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.num_steps = 0
        self.num_failures = 0  # so many of the coming steps fail, after the masks are filled
        self.logits = -1.5 * np.log1p(np.arange(vocab_size))
        self.token_counts: list[int] = []

    def execute(self, batch: Batch) -> StepResult:
        self.num_steps += 1
        self.token_counts += [len(s.token_ids) for s in batch.sequences]
        token_ids = tuple(self._draw(s, draw) for s in batch.sequences if s.drawn for draw in s.drawn.draws)
        if self.num_failures:
            self.num_failures -= 1
            raise RuntimeError("planted failure")
        return StepResult(token_ids)

    def _draw(self, scheduled: ScheduledSequence, draw: Draw) -> int:
        allowed = (
            np.ones(self.vocab_size, bool)
            if scheduled.drawn.masks is None
            else allowed_tokens(scheduled.drawn.masks[0], self)
        )
        if draw.allowed_token_ids is not None:
            allowed &= np.isin(np.arange(self.vocab_size), draw.allowed_token_ids)
        logits = np.where(allowed, self.logits / max(draw.temperature, 1e-6), -np.inf)
        if not allowed.any():
            return -1
        if draw.top_k:
            logits[logits < np.sort(logits)[-draw.top_k]] = -np.inf
        weights = np.cumsum(np.exp(logits - logits.max()))
        return int(np.searchsorted(weights, uniform(draw.random_key, scheduled.end) * weights[-1], side="right"))


def allowed_tokens(words: np.ndarray, executor: MaskedExecutor) -> np.ndarray:
    bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
    assert not bits[executor.vocab_size :].any()
    return bits[: executor.vocab_size]


_shared: list[GrammarCompiler] = []


def masked_llm(*, share_compiler: bool = True, **kwargs: object) -> tuple[LLM, MaskedExecutor]:
    """An LLM with the embedded checkpoint's configuration and tokenizer, and no model. All have one compiler."""
    plan = plan_memory(EngineArgs(**{"num_gpu_blocks_override": 256, "max_model_len": 512} | kwargs))
    executor = MaskedExecutor(plan.config.model.vocab_size)
    model, tokenizer = plan.config.model, Tokenizer.from_path(plan.config.model.tokenizer_path)
    engine = LLMEngine(plan, executor, tokenizer)
    if share_compiler:
        if not _shared:
            _shared.append(GrammarCompiler(tokenizer, model.vocab_size, model.eos_token_ids, trial_limit_s=1))
        engine.grammars.compiler = _shared[0]
    return LLM.from_engine(engine), executor


def wait_for_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a step with nothing else to do takes as long as a compilation does, so that none is idle."""
    monkeypatch.setattr("quire.engine.llm_engine._GRAMMAR_WAIT_S", 60.0)


def structured(max_tokens: int = 400, **kwargs: object) -> SamplingParams:
    """SamplingParams, with the structure's own fields among the arguments."""
    names = {name for name in kwargs if name in StructuredOutputsParams.__struct_fields__}
    structure = StructuredOutputsParams(**{name: kwargs.pop(name) for name in names})
    return msgspec.structs.replace(
        SamplingParams(**{"seed": 0, "max_tokens": max_tokens} | kwargs), structured_outputs=structure
    )


def run(llm: LLM) -> dict[str, RequestOutput]:
    """Step until nothing is left; the last output of each request."""
    outputs = {}
    for _ in range(STEPS_LIMIT):
        if not llm.engine.has_unfinished_requests():
            return outputs
        outputs |= {output.request_id: output for output in llm.engine.step()}
    raise AssertionError("livelock")

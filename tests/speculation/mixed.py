"""Requests of every kind in a tiny cache, with and without drafts: what to draft them by, and what must be equal."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, LoRARequest, SamplingParams
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafters import OthersTokens, OwnTokens, Predicted
from quire.engine.drafting.drafting import Drafting
from quire.engine.requests.sequence import Sequence as Seq
from quire.engine.requests.sequence import SequenceGroup
from tests.engine.fake import FunctionDrafter
from tests.engine.test_mixed_requests import LONGEST, VOCAB, any_params, any_prompt
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter

FORMATS: Mapping[str, dict[str, Any]] = {
    "bf16": {"dtype": "bfloat16"},
    "fp32": {"dtype": "float32"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "int8 KV": {"kv_cache_dtype": "int8"},
}
POLICIES = ("fcfs", "priority", "fair", "prefix")
CONFIG = SpeculativeConfig(num_speculative_tokens=6, min_match=1, is_adaptive=False)

Expected = Mapping[str, list[tuple[object, ...]]]
"""By request, what each of its samples has."""


@dataclass(frozen=True)
class Request:
    name: str
    prompt: list[int]
    params: Any
    adapter: LoRARequest | None


def make_llm(format_name: str, **changed: Any) -> LLM:
    """A cache so small that requests are preempted, swapped and find each other's prefixes."""
    settings = {"max_model_len": 64, "num_gpu_blocks_override": 20, "max_num_seqs": 64, "max_num_batched_tokens": 96}
    lora = {"enable_lora": True, "max_lora_rank": 4, "max_loras": 2}
    return LLM(**settings | {"swap_space": 0.001} | lora | FORMATS[format_name] | changed)


def write_adapters(folder: Path) -> list[LoRARequest]:
    """More adapters than slots."""
    sizes = tiny_sizes(LLM(max_model_len=64, num_gpu_blocks_override=4).engine.model_config)
    folders = [write_adapter(folder / str(i), make_tensors(sizes, 2, seed=i), r=2, lora_alpha=2) for i in range(3)]
    return [LoRARequest(f"adapter {i}", i + 1, str(path)) for i, path in enumerate(folders)]


def make_requests(num: int, seed: int, adapters: Sequence[LoRARequest]) -> list[Request]:
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCAB) for _ in range(LONGEST)]

    def repeating(prompt: list[int]) -> list[int]:
        return (prompt[:9] * LONGEST)[:LONGEST] if rng.random() < 0.5 else prompt

    return [
        Request(str(i), repeating(any_prompt(rng, shared)), any_params(rng), rng.choice([None, None, None, *adapters]))
        for i in range(num)
    ]


@dataclass
class Told:
    """What the callers saw."""

    samples: dict[str, list[tuple[object, ...]]]
    num_steps: int
    num_preemptions: int
    num_accepted: int
    num_drafts: int


def tokens_of(expected: Expected, group: SequenceGroup, seq: Seq) -> list[int]:
    """The whole output of a sequence as far as it is known: samples that are not among the best are not returned."""
    samples, index = expected[group.request_id], seq.output.index
    known = isinstance(group.params, SamplingParams) and group.params.best_of in (None, group.params.n)
    return list(samples[index][0]) if known and index < len(samples) else []  # type: ignore[call-overload]


def wrong(expected: Expected) -> Callable[[SequenceGroup, Seq], list[int]]:
    """Drafts of which the first is wrong in any case, if it is known what is right."""

    def draft(group: SequenceGroup, seq: Seq) -> list[int]:
        right = tokens_of(expected, group, seq)[seq.num_output_tokens :]
        return [(token_id + 1) % VOCAB for token_id in [*right, 7, 7, 7][:4]]

    return draft


def mostly_right(expected: Expected) -> Callable[[SequenceGroup, Seq], list[int]]:
    """Drafts of which one in five is wrong."""
    rng = random.Random(1)

    def draft(group: SequenceGroup, seq: Seq) -> list[int]:
        right = tokens_of(expected, group, seq)[seq.num_output_tokens :][:6]
        return [token_id if rng.random() < 0.8 else 5 for token_id in right]

    return draft


def failing(group: SequenceGroup, seq: Seq) -> list[int]:
    """A drafter that raises for every third sequence."""
    if seq.seq_id % 3 == 0:
        raise RuntimeError("planted")
    return [5, 6]


DRAFTERS: Mapping[str, Callable[[Expected], list[Any]]] = {
    "own": lambda expected: [OwnTokens(CONFIG)],
    "recent": lambda expected: [OthersTokens(CONFIG)],
    "prediction": lambda expected: [Predicted(CONFIG)],
    "all": lambda expected: [Predicted(CONFIG), OwnTokens(CONFIG), OthersTokens(CONFIG)],
    "wrong": lambda expected: [FunctionDrafter(wrong(expected))],
    "mostly right": lambda expected: [FunctionDrafter(mostly_right(expected))],
    "failing": lambda expected: [FunctionDrafter(failing)],
}


def predict(llm: LLM, request: Request, expected: Expected, rng: random.Random) -> None:
    """Give the request a prediction that is its output with some tokens changed, left out or added."""
    tokens: list[int] = []
    for token_id in expected[request.name][0][0]:  # type: ignore[attr-defined]
        tokens += rng.choice([[token_id]] * 8 + [[], [9], [token_id, 9]])
    group = llm.engine._groups[request.name]
    if tokens:
        group.prediction = np.array(tokens, np.int32)


def run(
    llm: LLM,
    requests: Sequence[Request],
    drafters: Sequence[Any] = (),
    expected: Expected | None = None,
    drafting: Drafting | None = None,
) -> Told:
    """All requests side by side, the accounting checked after every step. `drafting` is in the place of drafters."""
    engine, samples, rng = llm.engine, dict[str, Any](), random.Random(2)
    drafting = Drafting(drafters, CONFIG, 64) if drafters else drafting
    engine.scheduler.drafting = engine.committer.drafting = drafting
    num_steps, num_preemptions = engine.scheduler.num_steps, engine.scheduler.preemptor.num_preemptions
    for request in requests:
        engine.add_request(request.name, request.prompt, request.params, lora_request=request.adapter)
        if expected is not None:
            predict(llm, request, expected, rng)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                samples[output.request_id] = [
                    (o.token_ids, o.text, o.logprobs, o.cumulative_logprob, o.finish_reason, o.stop_reason)
                    for o in output.outputs
                ] + [([], output.prompt_logprobs, output.error)]
        engine.requests.check_integrity()
    assert engine.blocks.num_used_blocks == 0
    engine.blocks.forget_cached()
    stats = list(drafting.stats.values()) if drafting else []
    return Told(
        samples,
        engine.scheduler.num_steps - num_steps,
        engine.scheduler.preemptor.num_preemptions - num_preemptions,
        sum(counts.num_accepted for counts in stats),
        sum(counts.num_tokens for counts in stats),
    )


def check(llm: LLM, requests: Sequence[Request], drafters: Sequence[str] = tuple(DRAFTERS)) -> dict[str, Told]:
    """AssertionError unless each request gets the same from each drafter as without drafts."""
    without = run(llm, requests)
    found = {"off": without}
    for name in drafters:
        found[name] = run(llm, requests, DRAFTERS[name](without.samples), without.samples)
        for request in requests:
            assert found[name].samples[request.name] == without.samples[request.name], (name, request)
    return found

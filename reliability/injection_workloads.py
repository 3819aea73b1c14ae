"""The requests of reliability.injections."""

from __future__ import annotations

import random
from typing import Any

from torch import Tensor

from quire import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from quire.common.params import PoolingTask

VOCAB = range(3, 8000)
Params = SamplingParams | BeamSearchParams | PoolingParams
Wish = tuple[str, Any, Params | None]
"""Request id, prompt and params. Without params, the prompt is a pair (context, continuation) to score."""


def lift(output_token_ids: list[int], logits: Tensor) -> Tensor:
    """Change the logits, as a logits processor."""
    return logits + 0.5 * (len(output_token_ids) % 3)


def workload(number: int) -> list[Wish]:
    """Return five to eight requests of all kinds, always the same for one number."""
    rng = random.Random(f"workload {number}")
    common = rng.choices(VOCAB, k=rng.randint(4, 11))
    kinds = ["plain", "sampled", "samples", "beams", "grammar", "stop", "logprobs", "changed", "processed", "scored"]
    chosen = [*rng.sample(kinds, k=rng.randint(4, 7)), "plain"]
    wishes = list[Wish]()
    for place, kind in enumerate(chosen):
        own = rng.choices(VOCAB, k=rng.randint(1, 8))
        prompt: Any = common + own if rng.random() < 0.5 else own
        request_id = f"{place} {kind}"
        if kind == "stop" and rng.random() < 0.7:
            prompt = rng.choice(["def add(a, b):", "import os", "The list of"])
        wishes.append((request_id, (prompt, own) if kind == "scored" else prompt, _params(kind, rng)))
    return wishes


def pooling_workload(number: int) -> list[Wish]:
    """Return five to eight requests for vectors, always the same for one number."""
    rng = random.Random(f"pooling workload {number}")
    common = rng.choices(VOCAB, k=rng.randint(4, 11))
    wishes = list[Wish]()
    for place in range(rng.randint(5, 8)):
        own = rng.choices(VOCAB, k=rng.randint(1, 8))
        prompt: Any = rng.choice([common + own, own, "def add(a, b):", "import os"])
        task: PoolingTask = rng.choice(("embed", "embed", "token_embed"))
        params = PoolingParams(task=task, normalize=rng.choice([None, False]), tenant=rng.choice("ab"))
        wishes.append((f"{place} {task}", prompt, params))
    return wishes


def _params(kind: str, rng: random.Random) -> SamplingParams | BeamSearchParams | None:
    length = rng.randint(2, 9)
    if kind == "scored":
        return None
    if kind == "beams":
        return BeamSearchParams(rng.randint(2, 3), min(length, 5))
    given: dict[str, dict[str, Any]] = {
        "plain": {"temperature": 0},
        "sampled": {"temperature": 0.9, "top_p": 0.9},
        "samples": {"n": rng.randint(2, 3)},
        "grammar": {
            "structured_outputs": StructuredOutputsParams(choice=[str(rng.randrange(10**6)), str(rng.randrange(99))])
        },
        "stop": {"stop": ["e", "("], "min_tokens": 1},
        "logprobs": {"logprobs": 2, "prompt_logprobs": rng.choice([None, 1])},
        "changed": {"frequency_penalty": 0.7, "bad_words": ["the", " a"], "logit_bias": {5: 1.0}},
        "processed": {"logits_processors": [lift]},
    }
    kept: dict[str, Any] = {"seed": rng.randrange(10**6), "max_tokens": length, "ignore_eos": kind != "grammar"}
    return SamplingParams(**kept, output_kind=rng.choice(["cumulative", "final_only"]), **given[kind])

"""The requests of `reliability.digest`: every kind of request, always the same for one seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quire import BeamSearchParams, SamplingParams, StructuredOutputsParams

TOKENS = range(3, 8000)
"""token ids that prompts are made of; all checkpoints have them"""
LONGEST_PROMPT = 52
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
GRAMMAR = 'root ::= term ("+" term)*\nterm ::= [0-9] | "(" root ")"'
STRUCTURES: dict[str, dict[str, Any]] = {
    "choice": {"choice": ["yes", "no", "perhaps"]},
    "regex": {"regex": r"[a-c]{2,6}(-\d+)?"},
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "json object": {"json_object": True},
    "grammar": {"grammar": GRAMMAR},
}


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its parameters."""

    name: str
    """its request id"""
    prompt: Any
    params: SamplingParams | BeamSearchParams
    abort_after: int | None = None
    """steps between adding and aborting it; what it returns is not part of the digest, since its length depends on the
    schedule"""
    runs_alone: bool = False
    """whether it also runs alone, where it must return the same"""


def lift_thirds(token_ids: list[int], logits: Tensor) -> Tensor:
    """A logits processor."""
    logits[::3] += 0.5 + len(token_ids) % 2
    return logits


SAMPLED = {"temperature": 0.9}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, long": {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
    "greedy, until the end of sequence": {"temperature": 0.0, "max_tokens": 40},
    "one token": {"temperature": 0.0, "max_tokens": 1, "logprobs": 5},
    "sampled, long": {"temperature": 1.0, "max_tokens": 36, "ignore_eos": True},
    "hot": {"temperature": 1.7},
    "top-k": SAMPLED | {"top_k": 20},
    "top-p": SAMPLED | {"top_p": 0.8},
    "min-p": SAMPLED | {"min_p": 0.05},
    "top-k, top-p and min-p": {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "logprobs": 3},
    "penalties": SAMPLED | {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "negative penalties": SAMPLED | {"presence_penalty": -0.5, "frequency_penalty": -0.3, "repetition_penalty": 0.8},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2, "logprobs": 2},
    "logit bias": SAMPLED | {"logit_bias": {7: 5.0, 90: 3.5, 411: -100.0, 5000: 8.0}},
    "bad words": {"temperature": 0.0, "bad_words": ["the", "return", "self.", "of the"]},
    "allowed tokens": SAMPLED | {"allowed_token_ids": list(range(40, 540)), "logprobs": 2},
    "stop strings": SAMPLED | {"stop": ["e", "th", "\n"], "min_tokens": 3},
    "stop string kept": SAMPLED | {"stop": "a", "include_stop_str_in_output": True},
    "stop tokens": SAMPLED | {"stop_token_ids": list(range(3, 8000, 11))},
    "min tokens": SAMPLED | {"min_tokens": 10, "logit_bias": {2: 12.0}, "ignore_eos": False},
    "three samples": SAMPLED | {"n": 3},
    "three samples, long": SAMPLED | {"n": 3, "max_tokens": 24, "ignore_eos": True, "logprobs": 1},
    "two of four": SAMPLED | {"n": 2, "best_of": 4},
    "logprobs": SAMPLED | {"logprobs": 5},
    "no other logprobs": {"temperature": 0.0, "logprobs": 0},
    "logprobs with a bias": SAMPLED | {"logprobs": 5, "top_k": 4, "logit_bias": {100: 4.0}, "presence_penalty": 1.0},
    "prompt logprobs": {"temperature": 0.0, "prompt_logprobs": 5, "logprobs": 5},
    "prompt logprobs of samples": SAMPLED | {"prompt_logprobs": 1, "n": 2},
    "logits processor": SAMPLED | {"logits_processors": [lift_thirds]},
    "salted": {"temperature": 0.0, "cache_salt": "pepper"},
    "truncated": {"temperature": 0.0, "truncate_prompt_tokens": 9},
    "without text": SAMPLED | {"detokenize": False, "logprobs": 1},
    "special tokens shown": {"temperature": 0.0, "skip_special_tokens": False},
    "structured samples": SAMPLED | {"structured_outputs": {"regex": r"[0-9]{1,4}"}, "n": 2, "logprobs": 2},
    **{f"{name}, greedy": {"temperature": 0.0, "structured_outputs": STRUCTURES[name]} for name in STRUCTURES},
    **{f"{name}, sampled": SAMPLED | {"structured_outputs": STRUCTURES[name]} for name in STRUCTURES},
    "without a seed": {"temperature": 1.0, "seed": None},
}
BEAMS: dict[str, dict[str, Any]] = {
    "beams": {"beam_width": 3, "max_tokens": 8},
    "beams, long outputs": {"beam_width": 4, "max_tokens": 12, "length_penalty": 1.5, "early_stopping": "never"},
    "beams, early end": {
        "beam_width": 2,
        "max_tokens": 10,
        "early_stopping": True,
        "stop_token_ids": [*range(50, 900)],
    },
    "beams, structured": {"beam_width": 2, "max_tokens": 6, "structured_outputs": STRUCTURES["choice"]},
}
RUN_ALONE = {
    *("greedy, long", "sampled, long", "top-k, top-p and min-p", "penalties", "three samples, long", "two of four"),
    *("prompt logprobs", "regex, sampled", "beams", "random 0", "random 1"),
}


def workload(seed: int, num_random: int) -> list[Request]:
    """All named kinds and `num_random` random requests, shuffled; also two requests that are aborted."""
    rng = random.Random(f"digest {seed}")
    shared = rng.choices(TOKENS, k=LONGEST_PROMPT)
    requests = [_sampling(name, fields, rng, shared) for name, fields in SAMPLING.items()]
    requests += [_beams(name, fields, rng, shared) for name, fields in BEAMS.items()]
    requests += [
        Request(name := f"random {i}", _prompt(rng, shared), _random_params(rng), None, name in RUN_ALONE)
        for i in range(num_random)
    ]
    rng.shuffle(requests)
    requests += [
        Request("text", "import json\n\ndef save(path, data):", SamplingParams(temperature=0, max_tokens=12)),
        Request("the whole shared prompt", shared, SamplingParams(temperature=0, max_tokens=12)),
        Request("the whole shared prompt again", shared, SamplingParams(temperature=0, max_tokens=12)),
    ]
    aborted = SamplingParams(temperature=0.8, seed=1, n=2, max_tokens=40, ignore_eos=True, priority=-3)
    for place in (2, len(requests) // 2):
        requests.insert(place, Request(f"aborted {place}", _prompt(rng, shared), aborted, abort_after=9))
    return requests


def _prompt(rng: random.Random, shared: list[int]) -> list[int]:
    """A prompt that mostly begins with some of the shared tokens, often not a multiple of the block size."""
    length = rng.randint(1, LONGEST_PROMPT)
    num_shared = rng.randint(0, length) if rng.random() < 0.7 else 0
    return shared[:num_shared] + rng.choices(TOKENS, k=length - num_shared)


def _place(rng: random.Random) -> dict[str, Any]:
    """What the scheduling policies order requests by."""
    return {"priority": rng.randrange(3), "tenant": rng.choice("abc")}


def _structured(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields, with the structure as StructuredOutputsParams."""
    structure = fields.get("structured_outputs")
    return fields if structure is None else fields | {"structured_outputs": StructuredOutputsParams(**structure)}


def _sampling(name: str, fields: dict[str, Any], rng: random.Random, shared: list[int]) -> Request:
    is_structured = "structured_outputs" in fields
    defaults = {"seed": rng.randrange(2**40), "max_tokens": 20 if is_structured else rng.randint(10, 18)}
    params = SamplingParams(**(defaults | _place(rng) | _structured(fields)))
    return Request(name, _prompt(rng, shared), params, runs_alone=name in RUN_ALONE)


def _beams(name: str, fields: dict[str, Any], rng: random.Random, shared: list[int]) -> Request:
    params = BeamSearchParams(**(_place(rng) | _structured(fields)))
    return Request(name, _prompt(rng, shared), params, runs_alone=name in RUN_ALONE)


def _random_params(rng: random.Random) -> SamplingParams:
    """Parameters in which each setting is present or absent at random."""

    def some(share: float, value: Any, otherwise: Any = None) -> Any:
        return value if rng.random() < share else otherwise

    is_greedy, n, max_tokens = rng.random() < 0.3, some(0.2, rng.randint(2, 3), 1), rng.randint(1, 24)
    return SamplingParams(
        n=n,
        best_of=None if is_greedy or rng.random() < 0.8 else n + rng.randint(0, 2),
        temperature=0.0 if is_greedy else rng.choice((0.5, 1.0, 1.7)),
        top_p=some(0.4, rng.uniform(0.2, 0.99), 1.0),
        top_k=some(0.4, rng.randint(1, 60), 0),
        min_p=some(0.2, rng.uniform(0.0, 0.2), 0.0),
        presence_penalty=some(0.2, rng.uniform(-2, 2), 0.0),
        frequency_penalty=some(0.2, rng.uniform(-2, 2), 0.0),
        repetition_penalty=some(0.2, rng.uniform(0.7, 1.6), 1.0),
        seed=rng.randrange(2**40),
        max_tokens=max_tokens,
        min_tokens=some(0.2, rng.randint(0, max_tokens), 0),
        stop=some(0.2, ["e", "th", "\n"]),
        stop_token_ids=some(0.1, rng.choices(TOKENS, k=300)),
        logprobs=some(0.4, rng.randint(0, 5)),
        prompt_logprobs=some(0.2, rng.randint(0, 3)),
        logit_bias=some(0.2, {rng.choice(TOKENS): rng.uniform(-9, 9) for _ in range(20)}),
        bad_words=some(0.1, ["the", "return", "self."]),
        allowed_token_ids=some(0.1, sorted(set(rng.choices(TOKENS, k=500)))),
        ignore_eos=rng.random() < 0.5,
        **_place(rng),
    )

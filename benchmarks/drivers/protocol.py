"""The protocol of drivers: requests on standard input and answers on standard output, one JSON object per line."""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]

TEMPERATURE, TOP_P = 0.8, 0.95
"""How tokens are drawn where `generate` is asked to sample; otherwise the likeliest one is taken."""

_SEED = 0
_TOKEN_IDS = range(3, 7000)
"""Token ids that are in every vocabulary, without special tokens."""


def random_prompts(num_prompts: int, input_len: int) -> list[list[int]]:
    """Return random prompts, the same for every engine."""
    generator = random.Random(_SEED)
    return [generator.choices(_TOKEN_IDS, k=input_len) for _ in range(num_prompts)]


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def serve(load: Callable[[], Mapping[str, Handler]]) -> None:
    """Load the model, write how long that took, then answer each `{"op": name, ...}` with that handler's result.

    An exception while loading is reported as `{"error": ...}` and ends the driver; any later exception ends it too.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print to standard output, also from C++

    def answer(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    start = time.perf_counter()
    try:
        handlers = load()
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise
    answer({"load_s": time.perf_counter() - start})
    for line in sys.stdin:
        request = json.loads(line)
        answer(handlers[request.pop("op")](**request))

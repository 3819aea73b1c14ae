"""How a driver is talked to: one JSON object a line, asked on standard input, answered on standard output."""

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[..., dict[str, Any]]

_SEED = 0
_TOKEN_IDS = range(3, 7000)
"""in every vocabulary, and none of them special"""


def random_prompts(num_prompts: int, input_len: int) -> list[list[int]]:
    """The same for every engine."""
    generator = random.Random(_SEED)
    return [generator.choices(_TOKEN_IDS, k=input_len) for _ in range(num_prompts)]


def timed(call: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def serve(load: Callable[[], Mapping[str, Handler]]) -> None:
    """Load, say how long that took, then answer `{"op": name, ...}` with that handler's result until the input ends.

    An exception while loading is answered with `{"error": ...}` and ends the driver; later ones end it by themselves.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # engines print, and some of it from C++

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

"""Measure the sampler's time for a step, from the draws and the tokens so far to the sampled tokens.

    python tools/bench_sampling.py [--rows 64] [--vocab 152000] [--history 1000] [--threads 0] [--seconds 0.5]

Prints a table of milliseconds per step, the shortest of several runs: for building the tensors, and in total. Logits
are normally distributed with a standard deviation of 3, about as peaked as a language model's, or 0.3, nearly flat.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch

from quire import kernels
from quire.common.batch import Draw, DrawnRows, ScheduledSequence
from quire.runner.sampling.draw_tensors import DrawTensors, draws_of
from quire.runner.sampling.sampler import Sampler

CPU = kernels.backend_for("cpu")
SPREADS = (3.0, 0.3)
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1}
SETTINGS: dict[str, dict[str, float | int]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 50": {"top_k": 50},
    "top-k 50, top-p 0.9": {"top_k": 50, "top_p": 0.9},
    "top-k 50, top-p 0.9, penalties": {"top_k": 50, "top_p": 0.9, **PENALTIES},
    "top-k 50, top-p 0.9, penalties, mask": {"top_k": 50, "top_p": 0.9, **PENALTIES},
    "top-p 0.9, penalties": {"top_p": 0.9, **PENALTIES},
    "min-p 0.1": {"min_p": 0.1},
    "min-p 0.1, penalties": {"min_p": 0.1, **PENALTIES},
    "mask": {},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def main() -> None:
    """Measure every setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=152_000)
    parser.add_argument("--history", type=int, default=1000, help="tokens of prompt and output, half each")
    parser.add_argument("--threads", type=int, default=0, help="number of threads; 0: all")
    parser.add_argument("--seconds", type=float, default=0.5, help="seconds for each figure of the table")
    options = parser.parse_args()
    kernels.set_num_threads(options.threads or kernels.num_threads())
    torch.set_num_threads(1)
    print(f"{options.rows} rows of {options.vocab}, {kernels.num_threads()} threads, {kernels.isa()}; ms per step")
    print(f"{'':40}{'tensors':>10}" + "".join(f"{f'N(0, {spread:g})':>12}" for spread in SPREADS))
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(options.rows, options.vocab, generator=generator)
    for name, setting in SETTINGS.items():
        sequences = make_sequences(name, setting, options.rows, options.vocab, options.history)
        tensors = DrawTensors(draws_of(sequences), options.vocab)
        times = [shortest_ms(lambda s=sequences, t=tensors: t.at(s, {}), options.seconds)]  # type: ignore[misc]
        for spread in SPREADS:
            scaled, sampler = logits * spread, Sampler(CPU)
            times.append(shortest_ms(lambda: sampler.sample(scaled, sequences), options.seconds))  # noqa: B023
        print(f"{name:40}{times[0]:10.3f}" + "".join(f"{ms:12.2f}" for ms in times[1:]), flush=True)


def make_sequences(
    name: str, setting: dict[str, float | int], num_rows: int, vocab: int, num_tokens: int
) -> list[ScheduledSequence]:
    """Decoding sequences, each with a history and a mask of its own where they are needed."""
    rng = np.random.default_rng(0)
    sequences = []
    for row in range(num_rows):
        draw = Draw(**{"temperature": 1.0, "top_k": 0, "top_p": 1.0, "random_key": bytes([row % 256]), **setting})  # type: ignore[arg-type]
        history = rng.integers(0, vocab, num_tokens, dtype=np.int32) if draw.needs_history else None
        mask = rng.integers(-(2**31), 2**31, -(-vocab // 32), dtype=np.int32) if "mask" in name else None
        drawn = DrawnRows((draw,), num_tokens // 2, 1, history, None if mask is None else (mask,))
        sequences.append(ScheduledSequence(row, (0,), num_tokens - 1, (), drawn))
    return sequences


def shortest_ms(call: Callable[[], object], seconds: float) -> float:
    """Return the shortest time of the calls that fit into a time."""
    best, end = float("inf"), time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        call()
        best = min(best, time.perf_counter() - start)
    return best * 1000


if __name__ == "__main__":
    main()

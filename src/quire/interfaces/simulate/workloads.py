"""Synthetic traces, made from a seed and the name of a shape."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from math import log

from msgspec.structs import replace

from quire.common.errors import ConfigError
from quire.interfaces.simulate.trace import MAX_WIDTH, TraceRequest

MAX_LEN = 2048
NUM_REQUESTS = 1000


def synthetic_trace(
    seed: int,
    num_requests: int | None = None,
    *,
    shape: str = "mixed",
    requests_per_s: float = 5.0,
    n: int = 1,
    beam_width: int = 1,
) -> Iterator[TraceRequest]:
    """Return a trace of a shape (see SHAPES), by default of 1,000 requests; each has `n` samples or `beam_width` beams.

    Users of `chat` have 8 turns each; by default there are 32 users, otherwise enough for `num_requests` turns.
    """
    if shape not in SHAPES:
        raise ConfigError(f"shape={shape!r}: must be one of {', '.join(SHAPES)}")
    if num_requests is not None and num_requests < 1:
        raise ConfigError(f"num_requests={num_requests}: must be at least 1")
    if not 0 < requests_per_s <= 1e9:
        raise ConfigError(f"requests_per_s={requests_per_s}: must be more than 0 and at most 1e9")
    for name, width in (("n", n), ("beam_width", beam_width)):
        if not 1 <= width <= MAX_WIDTH:
            raise ConfigError(f"{name}={width}: must be from 1 to {MAX_WIDTH}")
    trace = SHAPES[shape](seed, num_requests, requests_per_s)
    return trace if n == beam_width == 1 else (replace(r, n=n, beam_width=beam_width) for r in trace)


def mixed_trace(seed: int, num_requests: int | None = None, requests_per_s: float = 5.0) -> Iterator[TraceRequest]:
    """Yield requests with Poisson arrivals and log-normal lengths, of about 160 tokens in and 60 out.

    Half of the requests begin with one of 20 shared prefixes.
    """
    rng = random.Random(f"trace {seed}")
    for arrival_s in _arrivals(rng, num_requests or NUM_REQUESTS, requests_per_s):
        prompt_len = 1 + int(min(rng.lognormvariate(4.8, 0.8), 1500))
        output_len = 1 + int(min(rng.lognormvariate(3.8, 0.7), 400))
        group, prefix_len = (rng.randrange(20), min(128, prompt_len)) if rng.random() < 0.5 else (None, 0)
        yield TraceRequest(arrival_s, prompt_len, output_len, group, prefix_len)


def dataset_trace(
    mean_prompt_len: float,
    mean_output_len: float,
    seed: int,
    num_requests: int | None = None,
    requests_per_s: float = 5.0,
) -> Iterator[TraceRequest]:
    """Yield requests with Poisson arrivals, unrelated prompts, and log-normal lengths with the given means."""
    rng = random.Random(f"dataset {seed}")
    for arrival_s in _arrivals(rng, num_requests or NUM_REQUESTS, requests_per_s):
        yield TraceRequest(arrival_s, _length(rng, mean_prompt_len, 0.9), _length(rng, mean_output_len, 0.7))


def chat_trace(
    seed: int, *, users: int = 32, turns: int = 8, system_len: int = 1000, users_per_s: float = 5.0
) -> Iterator[TraceRequest]:
    """Yield conversations that all begin with the same system prompt.

    A turn adds about 40 tokens, and an answer has about 120. Users arrive in a Poisson stream and take about 5 s to
    write a message.
    """
    rng = random.Random(f"chat {seed}")
    for user, arrival_s in enumerate(_arrivals(rng, users, users_per_s)):
        for turn in range(turns):
            prefix_len = system_len if turn == 0 else 0
            yield TraceRequest(
                arrival_s,
                prefix_len + _length(rng, 40, 0.6),
                _length(rng, 120, 0.7),
                prefix_group=0 if prefix_len else None,
                prefix_len=prefix_len,
                session=user,
                think_s=round(rng.expovariate(0.2), 3) if turn else 0.0,
            )


def tenants_trace(
    seed: int, num_requests: int | None = None, requests_per_s: float = 5.0, *, tenants: int = 3, flood: float = 10.0
) -> Iterator[TraceRequest]:
    """Yield requests like those of `mixed` from several tenants; the first sends `flood` times as many as any other."""
    rng = random.Random(f"tenants {seed}")
    names = ["flood", *(f"steady-{i}" for i in range(1, tenants))]
    for request in mixed_trace(seed, num_requests, requests_per_s * (flood + tenants - 1)):
        yield replace(request, tenant=rng.choices(names, [flood] + [1.0] * (tenants - 1))[0])


def _arrivals(rng: random.Random, num: int, per_s: float) -> Iterator[float]:
    """Yield the times of a Poisson stream."""
    arrival_s = 0.0
    for _ in range(num):
        arrival_s += rng.expovariate(per_s)
        yield round(arrival_s, 6)


def _length(rng: random.Random, mean: float, sigma: float) -> int:
    """Return a random log-normal length; `sigma` is the standard deviation of its logarithm."""
    return max(1, min(MAX_LEN, round(rng.lognormvariate(log(mean) - sigma**2 / 2, sigma))))


def _chat(seed: int, num_requests: int | None, requests_per_s: float) -> Iterator[TraceRequest]:
    if num_requests is None:
        return chat_trace(seed, users_per_s=requests_per_s)
    return islice(chat_trace(seed, users=-(-num_requests // 8), users_per_s=requests_per_s), num_requests)


SHAPES: dict[str, Callable[[int, int | None, float], Iterator[TraceRequest]]] = {
    "mixed": mixed_trace,
    "alpaca": partial(dataset_trace, 19.31, 58.45),
    "sharegpt": partial(dataset_trace, 161.31, 337.99),
    "chat": _chat,
    "tenants": tenants_trace,
}
"""Traces by name. Mean lengths of `alpaca` and `sharegpt` are those of Kwon et al. 2023 (PagedAttention), figure 11."""

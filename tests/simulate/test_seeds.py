"""Two hundred small worlds: caches so tight that everything happens, checked after every step."""

import random

import pytest

from quire.interfaces.simulate.trace import TraceRequest

from .helpers import CheckedSimulator, alone, simulate

NUM_SEEDS, CHUNK = 200, 20


def tiny_trace(rng):
    """Requests of all kinds, each of which has room in the smallest cache below when it is alone."""
    arrival_s, turns, trace = 0.0, [0, 0], []
    for _ in range(20):
        arrival_s += rng.choice((0.0, 0.02, 0.1))
        fields = {"tenant": rng.choice("abc"), "priority": rng.randrange(3)}
        prompt_len, kind = rng.randrange(1, 20), rng.randrange(6)
        session = rng.randrange(2)
        if kind == 0:
            fields["n"] = rng.randrange(2, 4)
        elif kind == 1:
            fields["beam_width"] = rng.randrange(2, 4)
        elif kind == 2 and turns[session] < 3:
            fields["session"] = session
            prompt_len = rng.randrange(1, 8)
            turns[session] += 1
        if rng.random() < 0.5 and "session" not in fields:
            fields |= {"prefix_group": rng.randrange(2), "prefix_len": rng.randrange(1, prompt_len + 1)}
        trace.append(TraceRequest(round(arrival_s, 2), prompt_len, rng.randrange(1, 25), **fields))
    return trace


def tiny_limits(rng):
    return {
        "num_blocks": rng.randrange(34, 44),
        "block_size": 4,
        "num_host_blocks": rng.choice((0, 10, 60)),
        "caching": rng.random() < 0.7,
        "tokens": rng.choice((5, 9, 64)),
        "seqs": rng.choice((3, 6, 64)),
        "preemption_mode": rng.choice((None, "swap", "recompute")),
        "policy": rng.choice(("fcfs", "priority", "fair", "prefix")),
    }


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=[pytest.mark.thorough] * (first >= NUM_SEEDS // 2))
        for first in range(0, NUM_SEEDS, CHUNK)
    ],
)
def test_no_schedule_changes_an_output(first):
    preemptions = 0
    for seed in range(first, first + CHUNK):
        rng = random.Random(seed)
        trace = tiny_trace(rng)
        limits = tiny_limits(rng)
        tight = simulate(trace, kind=CheckedSimulator, **limits)
        solo = simulate(alone(trace), caching=False)
        assert tight["requests"] == solo["requests"] == len(trace), (seed, limits)
        assert tight["outputs_digest"] == solo["outputs_digest"], (seed, limits)
        preemptions += sum(tight["preemptions"].values())
    assert preemptions > 0

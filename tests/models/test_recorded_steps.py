"""Steps whose kernels run once all of them have been called, and whose recordings are not kept."""

import math
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.kernels import KernelGraph
from quire.runner.decode_graphs import DecodeGraphs
from tests.kernels.isas import needs_native

PARAMS = SamplingParams(temperature=0, max_tokens=1, logprobs=3, ignore_eos=True)
PROMPTS = [[*range(10, 10 + n)] for n in (47, 30, 61)]
WIDTH = 256  # of quire-tiny


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kernels each recording runs."""
    seen: list[int] = []
    replay = KernelGraph.replay
    monkeypatch.setattr(KernelGraph, "replay", lambda graph: (seen.append(len(graph)), replay(graph))[1])
    return seen


def drawn(monkeypatch: pytest.MonkeyPatch, work: float, prompts: list[list[int]]) -> list[Any]:
    monkeypatch.setattr("quire.runner.model_runner._RECORDED_WORK", work)
    monkeypatch.setattr(DecodeGraphs, "can_replay", lambda *_: False)  # as if the prompts were longer
    llm = LLM("quire-tiny", enable_prefix_caching=False, num_gpu_blocks_override=64)
    outputs = [llm.generate(prompt, PARAMS, use_tqdm=False)[0] for prompt in prompts]
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@needs_native
def test_a_recorded_step_has_the_bits_of_a_plain_one(monkeypatch: pytest.MonkeyPatch, replayed: list[int]) -> None:
    plain = drawn(monkeypatch, math.inf, PROMPTS)
    assert not replayed
    assert drawn(monkeypatch, 0, PROMPTS) == plain
    assert len(replayed) == len(PROMPTS)
    assert min(replayed) > 30, "the kernels of all layers"


@needs_native
def test_short_steps_of_narrow_models_are_not_recorded(monkeypatch: pytest.MonkeyPatch, replayed: list[int]) -> None:
    drawn(monkeypatch, 40 * WIDTH**2, [PROMPTS[0], *PROMPTS])
    assert len(replayed) == 2, "the first step tells how wide hidden states are, and the prompt of 30 tokens is short"

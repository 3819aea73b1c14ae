"""Requests of every kind get the same bits whatever a draft head says.

`pytest -m thorough tests/speculation` runs 200 requests with each head in each format.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.common.faults import Fault, inject

from . import heads
from .heads import MTP_NAMES, Head, mtp
from .mixed import FORMATS, POLICIES, make_llm, make_requests, run, write_adapters
from .test_heads import SETTINGS, numbers

HEADS: dict[str, tuple[Callable[[], Head], dict[str, str]]] = {
    "eagle": (heads.eagle, heads.EAGLE_NAMES),
    "eagle3": (heads.eagle3, heads.EAGLE3_NAMES),
    "mtp": (lambda: mtp("qwen"), MTP_NAMES["qwen"]),
}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


def broken(head: Head) -> Head:
    """No number comes out of it."""
    head.tensors["fc.weight"].fill_(float("nan"))
    return head


def check(folder: Path, head: Head, names: dict[str, str], format_name: str, num: int, seed: int, adapters) -> int:
    """How many tokens the head has drafted."""
    config = {"model": str(heads.write(folder, head, names)), "num_speculative_tokens": 3, "adaptive": False}
    policy = POLICIES[seed % len(POLICIES)]
    llm = make_llm(format_name, speculative_config=config, scheduling_policy=policy, num_gpu_blocks_override=30)
    drafting, requests = llm.engine.scheduler.drafting, make_requests(num, seed, adapters)
    without = run(llm, requests)
    told = run(llm, requests, drafting=drafting)
    for request in requests:
        assert told.samples[request.name] == without.samples[request.name], request
    assert not drafting.num_errors
    return drafting.stats["model"].num_tokens


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("head_name", "format_name"),
    [
        pytest.param(head, format, marks=[pytest.mark.thorough] * ((i + j) % 2), id=f"{head}-{format}")
        for i, head in enumerate(HEADS)
        for j, format in enumerate(FORMATS)
    ],
)
def test_no_head_changes_a_bit(head_name: str, format_name: str, tmp_path: Path, adapters: list[LoRARequest]) -> None:
    make_head, names = HEADS[head_name]
    seed = list(FORMATS).index(format_name)
    assert check(tmp_path, make_head(), names, format_name, 16, seed, adapters) > 30


@pytest.mark.thorough
@pytest.mark.parametrize("head_name", HEADS)
@pytest.mark.parametrize("format_name", FORMATS)
def test_no_head_changes_a_bit_of_200_requests(head_name: str, format_name: str, tmp_path: Path, adapters) -> None:
    make_head, names = HEADS[head_name]
    check(tmp_path, make_head(), names, format_name, 200, 7, adapters)


@pytest.mark.parametrize("head_name", HEADS)
def test_a_head_that_gives_no_numbers_drafts_nothing(head_name: str, tmp_path: Path, adapters) -> None:
    make_head, names = HEADS[head_name]
    assert check(tmp_path, broken(make_head()), names, "bf16", 12, 3, adapters) == 0


def test_a_head_that_fails_costs_its_drafts_and_drafts_again_for_others(tmp_path: Path) -> None:
    config = {"model": str(heads.write(tmp_path, heads.eagle(), {})), "adaptive": False}
    llm = LLM(speculative_config=config, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    def tokens() -> list[int]:
        return list(llm.generate({"prompt_token_ids": numbers(1, 20)}, params)[0].outputs[0].token_ids)

    stats = llm.engine.scheduler.drafting.stats["model"]
    expected = tokens()
    assert (before := stats.num_tokens) > 12
    with inject(Fault("draft.model", after=2)):
        assert tokens() == expected
    assert stats.num_tokens < 2 * before, "a step whose hidden states it has not read cannot be made up for"
    middle = stats.num_tokens
    assert tokens() == expected
    assert stats.num_tokens > middle + 12


def test_failures_are_counted_and_the_first_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM(speculative_config={"model": "quire-draft", "adaptive": False}, **SETTINGS)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with inject(Fault("draft.model", times=None)):
        llm.generate({"prompt_token_ids": numbers(1, 20)}, params)
    assert llm.engine.scheduler.drafting.num_errors["model"] >= 12
    assert [record.message for record in caplog.records].count("the draft model failed: this step makes no drafts") == 1


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_heads_draft_the_same_after_preemptions(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a head keeps of tokens goes where the tokens' blocks go."""
    config = {"model": str(heads.write(tmp_path, heads.eagle3(), {})), "adaptive": False}
    llm = LLM(speculative_config=config, swap_space=0.01, preemption_mode=mode, **SETTINGS)
    engine, told = llm.engine, []
    execute = engine.executor.execute
    monkeypatch.setattr(engine.executor, "execute", lambda batch: told.append((batch, execute(batch))) or told[-1][1])

    def drafts(preempts: bool) -> dict[int, object]:
        """By number of tokens known."""
        told.clear()
        engine.blocks.forget_cached()
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        engine.add_request("a", numbers(1, 30), params)
        while engine.has_unfinished_requests():
            engine.step()
            engine.requests.check_integrity()
            if preempts and engine.scheduler.num_steps % 5 == 0 and engine.requests.running:
                engine.scheduler.preemptor.preempt(engine.requests.running[0])
        return {
            batch.sequences[0].start: result.drafted[0].odds
            for batch, result in told
            if result.drafted and batch.sequences[0].num_drafts
        }

    expected, found = drafts(False), drafts(True)
    assert len(found) > 5
    for start in found.keys() & expected.keys():
        torch.testing.assert_close(found[start], expected[start])

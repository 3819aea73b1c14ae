"""How texts that are pooled run: whole or in chunks, and with the same bits whatever else runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from quire import LLM, PoolingParams, PromptTooLongError
from quire.common.batch import Batch, PooledRows, PoolSpec, StepResult, decode, encode
from quire.common.faults import Fault, inject
from quire.config.kv_cache import NoCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.engine.view.cache_frame import CacheUpdate
from quire.engine.view.cache_view import CacheView
from quire.kv.block_space_manager import AllocStatus, BlockSpaceManager

from .models import TinyEmbedder, TinyEncoder, known, made_llm, pooler_of

RAW = PoolingParams(normalize=False)
INSTRUCTION = [(7 * i) % 50 + 10 for i in range(18)]


def texts(num: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(10, 200, rng.integers(1, longest + 1)).tolist() for _ in range(num)]


def vectors(llm: LLM, prompts: list[list[int]], **params: Any) -> list[np.ndarray]:
    outputs = llm.encode(prompts, PoolingParams(normalize=False, **params), use_tqdm=False)
    assert [output.error for output in outputs] == [None] * len(prompts)
    return [output.outputs.data for output in outputs]


def batches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """The batches of the steps to come."""
    seen: list[Batch] = []
    execute: Callable[[Batch], StepResult] = llm.engine.executor.execute

    def executes(batch: Batch) -> StepResult:
        seen.append(decode(encode(batch), Batch))
        return decode(encode(execute(batch)), StepResult)

    monkeypatch.setattr(llm.engine.executor, "execute", executes)
    return seen


@pytest.mark.essential
@pytest.mark.parametrize("kind", ["encoder", "embedder", "mean_embedder"])
def test_a_text_has_the_same_bits_alone_and_among_others(kind: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(kind)
    prompts = texts(40)
    together = vectors(llm, prompts)
    shuffled = np.random.default_rng(1).permutation(40)
    for place, vector in zip(shuffled, vectors(llm, [prompts[i] for i in shuffled]), strict=True):
        assert np.array_equal(vector, together[place])
    for prompt, vector in zip(prompts[:8], together, strict=False):
        llm.reset_prefix_cache()
        assert np.array_equal(vectors(llm, [prompt])[0], vector)


def test_an_encoder_runs_each_text_whole_and_holds_no_blocks(encoder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = batches(encoder, monkeypatch)
    monkeypatch.setattr(encoder.engine.scheduler, "config", _with_budget(encoder, 48))
    prompts = texts(30)
    vectors(encoder, prompts)
    scheduled = [list(s.token_ids) for batch in seen for s in batch.sequences]
    assert scheduled == prompts, "in the order of arrival, none in parts"
    assert all(len(table) == 0 for batch in seen for s in batch.sequences for table in s.block_tables)
    assert all(batch.num_tokens <= 48 for batch in seen)
    assert len(seen) < 30, "steps are filled"
    assert encoder.engine.stats().kv_cache_usage == 0


def _with_budget(llm: LLM, num_tokens: int, **changes: Any) -> Any:
    return dataclasses.replace(llm.engine.scheduler.config, max_num_batched_tokens=num_tokens, **changes)


def test_the_budget_of_an_encoders_step_holds_its_longest_text() -> None:
    with made_llm(TinyEncoder, max_num_batched_tokens=16) as llm:
        assert llm.engine.plan.config.scheduler.max_num_batched_tokens == 48
        assert "KV cache    none: texts run whole" in str(llm.engine.plan)
        assert llm.engine.plan.kv_cache.total_bytes == 0
        assert vectors(llm, [[9] * 48])[0].shape == (llm.engine.pooler.dimensions,)


def test_whole_texts_progress_under_a_target_time_that_is_too_short(
    encoder: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder.engine.scheduler, "config", _with_budget(encoder, 96, target_step_ms=1e-6))
    vectors(encoder, texts(10))


@pytest.mark.essential
def test_whole_chunked_and_after_a_prefix_hit_are_equal_in_every_bit(embedder: LLM) -> None:
    prompts = [INSTRUCTION + text for text in texts(6, 20)]
    whole = []
    for prompt in prompts:
        embedder.reset_prefix_cache()
        whole += vectors(embedder, [prompt])
    for budget in 1, 5, 16:
        with made_llm(TinyEmbedder, max_num_batched_tokens=budget) as chunked:
            found = vectors(chunked, prompts)
            again = vectors(chunked, prompts)
        for a, b, c in zip(whole, found, again, strict=True):
            assert np.array_equal(a, b)
            assert np.array_equal(a, c)
    assert pooler_of(embedder).num_rows[-6:] == [1] * 6, "the last row alone is pooled"


def test_an_instruction_is_computed_once_for_a_hundred_texts(embedder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = batches(embedder, monkeypatch)
    prompts = [[*INSTRUCTION, 60 + i, 61 + i] for i in range(100)]
    outputs = embedder.embed(prompts, use_tqdm=False)
    block = embedder.engine.plan.kv_cache.block_size
    shared = len(INSTRUCTION) // block * block
    num_own = 100 * (len(prompts[0]) - shared)
    assert sum(batch.num_tokens for batch in seen) <= shared + num_own
    assert [output.num_cached_tokens >= shared for output in outputs] == [False] + [True] * 99


def test_pooling_of_all_rows_takes_nothing_from_the_cache(
    mean_embedder: LLM, embedder: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for llm, task in (mean_embedder, "embed"), (embedder, "classify"), (embedder, "token_embed"):
        for _ in range(2):
            seen = batches(llm, monkeypatch)
            (output,) = llm.encode([INSTRUCTION], pooling_task=task, use_tqdm=False)
            assert output.num_cached_tokens == 0
            assert [len(s.token_ids) for batch in seen for s in batch.sequences] == [len(INSTRUCTION)]


def test_a_text_that_must_run_whole_and_exceeds_the_step_is_refused_or_cut() -> None:
    with made_llm(TinyEmbedder, max_num_batched_tokens=16) as llm:
        (fine,) = llm.encode([[9] * 16], pooling_task="classify", use_tqdm=False)
        assert fine.error is None
        why = (
            "the text has 17 tokens, and the task 'classify' of this model needs them all in one step of 16: raise "
            "max_num_batched_tokens, or cut it with truncate_prompt_tokens"
        )
        with pytest.raises(PromptTooLongError, match=f"prompt 1: {why}"):
            llm.encode([[9] * 16, [9] * 17], pooling_task="classify", use_tqdm=False)
        assert llm.embed([[9] * 17], use_tqdm=False)[0].error is None
        for task, num_kept in (("classify", 16), ("embed", 17)):
            (cut,) = llm.encode([[9] * 17], pooling_task=task, truncate_prompt_tokens=-1, use_tqdm=False)
            assert len(cut.prompt_token_ids) == num_kept


def test_preemption_and_full_caches_change_no_bit(embedder: LLM, mean_embedder: LLM) -> None:
    prompts = texts(12, 30, seed=3)
    with made_llm(TinyEmbedder, num_gpu_blocks_override=14, max_num_batched_tokens=16) as small:
        for a, b in zip(vectors(embedder, prompts), vectors(small, prompts), strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair", "prefix"])
def test_policies_order_texts(policy: str) -> None:
    with made_llm(TinyEmbedder, scheduling_policy=policy, max_num_seqs=1, enable_prefix_caching=True) as llm:
        engine, order = llm.engine, []
        for i, (priority, tenant) in enumerate([(5, "a"), (5, "a"), (0, "b"), (5, "a")]):
            engine.add_request(str(i), [9, 10 + i, 11], PoolingParams(priority=priority, tenant=tenant))
        while engine.has_unfinished_requests():
            order += [output.request_id for output in engine.step()]
        expected = {"priority": ["2", "0", "1", "3"], "fair": ["0", "2", "1", "3"]}
        assert order == expected.get(policy, ["0", "1", "2", "3"])


def test_an_aborted_text_is_gone_and_the_others_are_not(embedder: LLM) -> None:
    engine = embedder.engine
    for i in range(3):
        engine.add_request(str(i), [9, 10 + i], RAW)
    output = engine.abort_request("1")
    assert output.pooled is None
    assert output.outputs[0].finish_reason == "abort"
    done = {output.request_id: output for output in engine.step()}
    assert done.keys() == {"0", "2"}
    assert all(output.finished and output.pooled is not None for output in done.values())
    assert [output.outputs[0].finish_reason for output in done.values()] == ["stop", "stop"]


POINTS = (
    "step.start", "step.execute", "step.run", "step.commit", "pool.sequence", "commit.sequence", "output.make",
    "blocks.allocate", "memory.workspace",
)  # fmt: skip


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("kind", ["encoder", "embedder"])
def test_a_failure_ends_at_most_one_request(point: str, kind: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(kind)
    prompts = texts(10, 12)
    expected = vectors(llm, prompts)
    llm.reset_prefix_cache()
    with inject(Fault(point, after=2 if point.endswith("sequence") else 0)) as injected:
        outputs = llm.encode(prompts, RAW, use_tqdm=False)
    failed = [output for output in outputs if output.error is not None]
    assert len(failed) <= 1
    assert injected.num_fired == 1
    for output, vector in zip(outputs, expected, strict=True):
        assert output.error is not None or np.array_equal(output.outputs.data, vector)
    llm.engine.requests.check_integrity()


def test_a_text_that_always_fails_the_step_is_found_and_ends(embedder: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute = embedder.engine.executor.execute

    def executes(batch: Batch) -> StepResult:
        if any(13 in s.token_ids for s in batch.sequences):
            raise RuntimeError("planted")
        return execute(batch)

    monkeypatch.setattr(embedder.engine.executor, "execute", executes)
    outputs = embedder.embed([[10, 11], [12, 13], [14, 15], [16, 17]], use_tqdm=False)
    assert [output.error is None for output in outputs] == [True, False, True, True]


def test_a_plan_and_its_result_are_plain_values() -> None:
    rows = PooledRows(0, 2, PoolSpec("embed", 4, normalize=True))
    result = StepResult((), pooled={0: np.arange(4, dtype=np.float32)}, pool_errors={1: "why"})
    again = decode(encode(result), StepResult)
    assert np.array_equal(again.pooled[0], result.pooled[0])
    assert again.pool_errors == {1: "why"}
    assert rows == PooledRows(0, 2, PoolSpec("embed", 4, True))


def test_a_cache_of_layers_that_keep_nothing_has_no_blocks() -> None:
    config = kv_cache_config([NoCacheSpec()] * 3, 16, num_bytes=0)
    assert (config.num_blocks, config.block_bytes, config.keeps_nothing) == (0, 0, True)
    assert not config.is_length_bounded
    manager = BlockSpaceManager(config, enable_prefix_caching=True)
    hit = manager.look_up(0, list(range(100)))
    assert manager.can_allocate(hit) is AllocStatus.OK
    assert manager.allocate(hit) == 0
    assert manager.can_append(0, 0, 100)
    manager.append(0, 0, 100)
    assert manager.has_room(0, 10_000)
    manager.publish(0, list(range(100)), 100)
    manager.free(0)
    manager.check_integrity()


def test_the_live_view_shows_texts_that_hold_no_blocks(encoder: LLM) -> None:
    view = CacheView(encoder.engine)
    encoder.engine.add_request("first", [9, 10], RAW)
    frame = msgspec.json.decode(view.frame(1.0), type=CacheUpdate)
    assert [(row.request_id, row.num_blocks) for row in frame.requests] == [("first", 0)]
    encoder.engine.step()
    frame = msgspec.json.decode(view.frame(2.0), type=CacheUpdate)
    assert [event.kind for event in frame.events if event.request_id == "first"] == ["started", "finished"]
    view.close()


def test_metrics_count_texts_as_requests_without_output() -> None:
    with made_llm(TinyEncoder, disable_log_stats=False) as llm:
        llm.embed([[9, 10], [9, 10, 11]], use_tqdm=False)
        found = {(metric.name, metric.labels.get("finished_reason")): metric for metric in llm.get_metrics()}
    assert found["vllm:request_success", "stop"].value == 2
    assert found["vllm:prompt_tokens", None].value == 5
    assert found["vllm:generation_tokens", None].value == 0
    assert found["vllm:e2e_request_latency_seconds", None].count == 2
    assert found["vllm:request_prompt_tokens", None].sum == 5
    assert found["vllm:request_params_max_tokens", None].count == 0
    assert found["vllm:kv_cache_usage_perc", None].value == 0


def test_sleeping_and_waking_change_no_bit() -> None:
    with made_llm(TinyEmbedder) as llm, known(TinyEmbedder):
        before = vectors(llm, [INSTRUCTION])
        llm.sleep()
        llm.wake_up()
        assert np.array_equal(vectors(llm, [INSTRUCTION])[0], before[0])

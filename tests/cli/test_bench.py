"""`quire bench`: each row says what was asked for, and its figures are possible ones."""

import dataclasses
import json
from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import pytest

from quire.cli import main
from quire.cli.bench import attention, kernels, latency, steps
from quire.cli.bench.limits import Limits, WeightCosts
from quire.cli.bench.throughput import greedy, random_prompts
from quire.common.batch import Batch, StepResult
from quire.config.args import EngineArgs
from quire.config.hf_config import HFConfig
from quire.engine.llm_engine import LLMEngine
from quire.kernels import isa
from quire.runner.memory_plan import plan_memory

from ..scripted_engine import scripted_llm

Rows = Callable[..., list[dict[str, Any]]]

needs_native = pytest.mark.skipif(isa() == "reference", reason="the native kernels measure the machine's limits")


@pytest.fixture
def rows(capsys: pytest.CaptureFixture[str]) -> Rows:
    """Run `quire bench` in this process; returns the rows it printed."""

    def run(*arguments: str) -> list[dict[str, Any]]:
        assert main(("bench", *arguments)) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


@needs_native
def test_kernels_reach_a_share_of_the_limit(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_SHAPES", ((64, 128), (96, 64)))
    monkeypatch.setattr(kernels, "_EXPERT_SHAPE", (512, 256))
    monkeypatch.setattr(kernels, "_HEAD_SHAPE", (4, 64, 32))
    monkeypatch.setattr(kernels, "_VOCAB", 1000)
    monkeypatch.setattr(kernels, "COLD_BYTES", 2**21)
    found = rows("kernels", "--rows", "2", "--seconds", "0", "--dtype", "float32")
    assert {row["kernel"].split()[0] for row in found} == {
        "matmul", "add_lora", "expert_matmul", "multiply_heads", "combine_experts", "rms_norm", "add_rms_norm",
        "layer_norm", "add_layer_norm", "gelu", "gated",
        "rotary_embedding", "interleaved", "scale", "softcap", "sample", "top_logprobs", "copy_blocks",
    }  # fmt: skip
    for row in found:
        assert row["us"] > 0
        assert row["of_limit"] > 0
        assert row["isa"] == isa()
    assert {row["dtype"] for row in found if row["kernel"] == "matmul"} == {"float32", "int8", "int4"}
    assert {row["dtype"] for row in found if row["kernel"] != "matmul"} == {"float32"}
    assert {row["rows"] for row in found if "rows" in row} == {2}
    assert all(row["limit"] == "reading" for row in found if "matmul" not in row["kernel"])


@needs_native
@pytest.mark.slow
def test_attention_decodes_every_context_and_prefills_the_short_ones(
    rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "COLD_BYTES", 2**21)
    found = rows("attention", "--context", "40", "4096", "--num-seqs", "1", "3", "--seconds", "0")
    cases = {(row["attention"], row["context"], row["num_seqs"]) for row in found}
    decodes = {
        (kind, context, num_seqs) for kind in ("decode", "latent") for context in (40, 4096) for num_seqs in (1, 3)
    }
    variants = {(variant, context, 1) for variant in ("softcap", "sinks", "slopes") for context in (40, 4096)}
    assert cases == decodes | variants | {("shared", 40, 3), ("shared", 4096, 3), ("prefill", 40, 1)}
    assert {row["cache"] for row in found} == {"bfloat16", "int8"}
    assert all(row["of_limit"] > 0 for row in found)


def test_the_bytes_of_a_shared_prefix_count_once(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "COLD_BYTES", 2**21)
    monkeypatch.setattr(attention, "compare", lambda calls, num_bytes, *_: {"bytes": num_bytes})
    found = rows("attention", "--context", "160", "--num-seqs", "3", "--seconds", "0", "--block-size", "16", "64")
    for block_size, num_shared in ((16, 144), (64, 128)):
        of_size = [row for row in found if row["block_size"] == block_size and row["cache"] == "bfloat16"]
        bytes_of = {row["attention"]: row["bytes"] for row in of_size}
        assert bytes_of["decode"] == 3 * bytes_of["prefill"]
        assert bytes_of["shared"] == bytes_of["prefill"] * (num_shared + 3 * (160 - num_shared)) / 160


def test_the_scheduler_runs_with_a_queue_behind_it(rows: Rows) -> None:
    found = rows("scheduler", "--num-seqs", "1", "8", "--waiting", "0", "50")
    assert [(row["num_seqs"], row["num_waiting"]) for row in found] == [(1, 0), (1, 50), (8, 0), (8, 50)]
    assert all(row[name] > 0 for row in found for name in ("add_us", "schedule_us", "commit_us"))


@needs_native
def test_latency_has_a_time_for_every_token(rows: Rows) -> None:
    arguments = ["--num-prompts", "3", "--input-len", "10", "--output-len", "4", "--num-gpu-blocks-override", "32"]
    (row,) = rows("latency", "--model", "quire-tiny", *arguments)
    assert (row["model"], row["num_prompts"], row["concurrency"]) == ("quire-tiny", 3, 4)
    for name in ("first_token_ms", "between_tokens_ms", "per_token_ms"):
        assert 0 < row[name]["p50"] <= row[name]["p90"] <= row[name]["p99"]
    assert row["of_limit"] > 0
    (row,) = rows("latency", "--request-rate", "1000", *arguments[:4], "--output-len", "1", *arguments[6:])
    assert (row["concurrency"], row["between_tokens_ms"], row["per_token_ms"], row["of_limit"]) == (None,) * 4


@needs_native
@pytest.mark.parametrize("benchmark", ["throughput", "latency"])
def test_tokens_are_drawn_as_the_options_say(benchmark: str, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    add = LLMEngine.add_request

    def watched(self: LLMEngine, request_id: str, prompt: Any, params: Any, **more: Any) -> None:
        asked.append((params.temperature, params.top_p, params.max_tokens))
        add(self, request_id, prompt, params, **more)

    monkeypatch.setattr(LLMEngine, "add_request", watched)
    small = ("--num-prompts", "2", "--input-len", "4", "--output-len", "3", "--num-gpu-blocks-override", "32")
    rows(
        benchmark, *small, "--temperature", "0.8", "--top-p", "0.95", *(["--json"] if benchmark == "throughput" else [])
    )
    assert set(asked) == {(0.8, 0.95, 3)}


def test_a_disturbance_of_some_seconds_changes_no_step_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count()
    monkeypatch.setattr(steps, "_step_times", lambda *_: [9.0 if 6 <= next(calls) < 10 else 1.0] * 3)
    found = rows("steps", "quire-tiny", "--prompt-lens", "8", "16", "--num-seqs", "1", "2", "--context", "8")
    assert [row["num_tokens"] for row in found] == [8, 8, 16, 16, 1, 2]
    assert {row["step_ms"] for row in found} == {1000}
    assert next(calls) == 4 * len(found)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_the_number_of_requests_at_once_is_limited(concurrency: int, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, executor = scripted_llm(speculative_config={"method": "off"})
    sizes = []
    execute = executor.execute

    def watched(batch: Batch) -> StepResult:
        sizes.append(len(batch.sequences))
        return execute(batch)

    monkeypatch.setattr(executor, "execute", watched)
    times = latency.token_times(llm.engine, random_prompts(5, 20, 1000), greedy(6), concurrency)
    assert max(sizes) == concurrency
    assert [len(tokens) for tokens in times] == [1 + 6] * 5, "the arrival, and each token"
    assert all(earlier <= later for tokens in times for earlier, later in pairwise(tokens))


def test_requests_keep_their_time_of_arrival_however_late_the_engine_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _ = scripted_llm()
    arrivals = []
    add = LLMEngine.add_request

    def watched(*arguments: Any, arrival_time: float) -> None:
        arrivals.append(arrival_time)
        add(*arguments, arrival_time=arrival_time)

    monkeypatch.setattr(LLMEngine, "add_request", watched)
    times = latency.token_times(llm.engine, random_prompts(4, 20, 1000), greedy(3), concurrency=1, request_rate=1e6)
    assert arrivals == [tokens[0] for tokens in times]
    assert arrivals == sorted(set(arrivals))


def test_the_least_time_counts_reading_or_multiplying_in_each_step() -> None:
    limits = Limits(read_bytes_per_s=100, flops_per_s=1000)
    case = {"num_prompts": 2, "input_len": 30, "output_len": 5, "max_num_batched_tokens": 25}
    # Prompts: 3 steps; 2 * (60 * 100 + 2 * 50) = 12,200 operations are 12.2 s, and reading takes 3 * 2 s.
    # Decodes: 4 steps of 2 s for reading; 2 * 2 * 150 = 600 operations take only 0.6 s.
    assert WeightCosts(num_bytes=200, body=100, head=50).generation_s(limits, **case) == pytest.approx(12.2 + 8)
    # Half the bytes: a decode step takes 1 s. A fifth of them: 0.4 s, and multiplying takes longer.
    assert WeightCosts(num_bytes=100, body=100, head=50).generation_s(limits, **case) == pytest.approx(12.2 + 4)
    assert WeightCosts(num_bytes=40, body=100, head=50).generation_s(limits, **case) == pytest.approx(12.2 + 2.4)
    # One token of each prompt: no decode step, and prompts so short that reading takes longer.
    case |= {"input_len": 1, "output_len": 1}
    assert WeightCosts(num_bytes=200, body=100, head=50).generation_s(limits, **case) == pytest.approx(2)


@needs_native
@pytest.mark.parametrize(("quantization", "of_body", "of_head"), [(None, 2, 2), ("int8", 1, 1), ("int4", 0.55, 1)])
def test_what_a_step_reads_and_multiplies_by(quantization: str | None, of_body: float, of_head: float) -> None:
    plan = plan_memory(EngineArgs(quantization=quantization, num_gpu_blocks_override=8, max_model_len=64))
    hf = plan.config.model.hf_config
    hidden, intermediate, layers = (hf.size(n) for n in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    qkvo = hidden * 2 * (hidden + hidden * hf.size("num_key_value_heads") // hf.size("num_attention_heads"))
    costs = WeightCosts.of(plan)
    assert costs.body == layers * (qkvo + 3 * hidden * intermediate)
    assert costs.head == hf.size("vocab_size") * hidden
    assert costs.num_bytes == plan.weight_bytes == pytest.approx(costs.body * of_body + costs.head * of_head, rel=0.03)


def test_a_table_that_is_not_the_head_too_is_not_read() -> None:
    tied = plan_memory(EngineArgs(num_gpu_blocks_override=8, max_model_len=64))
    model = tied.config.model
    table_bytes = model.vocab_size * model.hf_config.size("hidden_size") * 2
    hf = HFConfig({**model.hf_config, "tie_word_embeddings": False}, "config.json")
    config = dataclasses.replace(tied.config, model=dataclasses.replace(model, hf_config=hf))
    untied = dataclasses.replace(tied, config=config, weight_bytes=tied.weight_bytes + table_bytes)
    assert WeightCosts.of(untied) == WeightCosts.of(tied)


def test_of_experts_only_those_are_read_that_a_token_goes_to() -> None:
    plan = plan_memory(EngineArgs(num_gpu_blocks_override=8, max_model_len=64))
    model, sizes = plan.config.model, {"num_experts": 8, "moe_intermediate_size": 32}

    def costs(top_k: int) -> WeightCosts:
        hf = HFConfig({**model.hf_config, **sizes, "num_experts_per_tok": top_k}, "config.json")
        mixture = dataclasses.replace(model, hf_config=hf, architecture="Qwen3MoeForCausalLM")
        return WeightCosts.of(dataclasses.replace(plan, config=dataclasses.replace(plan.config, model=mixture)))

    matrices = model.hf_config.size("num_hidden_layers") * 3 * model.hf_config.size("hidden_size") * 32
    few, all_of_them = costs(2), costs(8)
    assert all_of_them.body - few.body == 6 * matrices
    assert all_of_them.num_bytes == plan.weight_bytes
    assert all_of_them.num_bytes - few.num_bytes == 6 * matrices * 2, "what experts take, in bfloat16"


def test_percentiles_are_values_that_were_measured() -> None:
    values = [index / 1000 for index in range(1, 101)]
    assert latency.percentiles_ms(values) == {"p50": 50, "p90": 90, "p99": 99}
    assert latency.percentiles_ms([0.002]) == {"p50": 2, "p90": 2, "p99": 2}


@pytest.mark.parametrize(
    "arguments",
    [
        ("kernels", "--rows", "0"),
        ("attention", "--context", "x"),
        ("scheduler", "--waiting", "-1"),
        ("latency", "--request-rate", "nan"),
        ("kernels", "--seconds", "-1"),
    ],
)
def test_numbers_out_of_range_are_refused_by_name(arguments: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(("bench", *arguments))
    assert arguments[1] in capsys.readouterr().err

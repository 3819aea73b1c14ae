"""LLM.get_metrics: what requests in this process count, under the names that a server exports."""

import pytest

from quire import LLM, ConfigError, SamplingParams
from quire.common.faults import Fault, inject
from quire.engine.metrics import HELP, Counter, Gauge, Histogram, Metric, Vector

from ..scripted_engine import scripted_llm

MEASURED = (
    "request_generation_tokens", "request_params_n", "e2e_request_latency_seconds", "iteration_tokens_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_max_num_generation_tokens",
)  # fmt: skip


@pytest.fixture
def llm() -> LLM:
    return scripted_llm(disable_log_stats=False)[0]


def metrics_of(llm: LLM) -> dict[str, Metric]:
    return {metric.name + str(list(metric.labels.values())[2:]): metric for metric in llm.get_metrics()}


def test_requests_are_counted_and_measured(llm: LLM) -> None:
    outputs = llm.generate(["Hello", "there"], SamplingParams(max_tokens=3, ignore_eos=True, n=2), use_tqdm=False)
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    found = metrics_of(llm)
    generated, running = found["vllm:generation_tokens[]"], found["vllm:num_requests_running[]"]
    assert isinstance(generated, Counter)
    assert generated.value == 12
    assert generated.labels == {"model_name": llm.engine.model_config.model, "engine": "0"}
    assert isinstance(running, Gauge)
    assert running.value == 0
    assert found["vllm:request_success['length']"].value == 2  # type: ignore[attr-defined]
    sums = {}
    for name in MEASURED:
        metric = found[f"vllm:{name}[]"]
        assert isinstance(metric, Histogram)
        assert metric.buckets["+Inf"] == metric.count
        sums[name] = metric.count, metric.sum
    assert sums["request_generation_tokens"] == (2, 12)
    assert sums["request_params_n"] == (2, 4)
    assert sums["request_max_num_generation_tokens"] == (2, 6)
    assert sums["iteration_tokens_total"] == (3, 12 + num_prompt_tokens)
    assert sums["time_to_first_token_seconds"][0] == sums["e2e_request_latency_seconds"][0] == 2
    assert sums["inter_token_latency_seconds"][0] == 4
    assert 0 < sums["time_to_first_token_seconds"][1] <= sums["e2e_request_latency_seconds"][1]


def test_aborted_requests_are_counted_and_forgotten(llm: LLM) -> None:
    llm.engine.add_request("early", "Hello", SamplingParams())
    llm.engine.abort_request("early")
    llm.engine.add_request("late", "Hello", SamplingParams())
    llm.engine.step()
    aborted = llm.engine.abort_request("late")
    assert aborted is not None
    assert aborted.metrics is not None
    assert aborted.metrics.finished_time is not None
    found = metrics_of(llm)
    assert found["vllm:request_success['abort']"].value == 2  # type: ignore[attr-defined]
    assert found["vllm:request_inference_time_seconds[]"].count == 1  # type: ignore[attr-defined]
    assert llm.engine._metrics is not None
    assert not llm.engine._metrics._live


@pytest.mark.usefixtures("quiet")
def test_a_request_whose_output_cannot_be_made_has_ended_with_an_error(llm: LLM) -> None:
    llm.engine.add_request("a", "Hello", SamplingParams())
    with inject(Fault("output.make")):
        (output,) = llm.engine.step()
    assert output.error is not None
    assert metrics_of(llm)["vllm:request_success['error']"].value == 1  # type: ignore[attr-defined]
    assert llm.engine._metrics is not None
    assert not llm.engine._metrics._live


def test_requests_are_measured_only_where_that_was_asked_for() -> None:
    llm = scripted_llm()[0]
    llm.generate("Hello", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(ConfigError, match="disable_log_stats=False"):
        llm.get_metrics()


def test_every_metric_has_an_explanation(llm: LLM) -> None:
    of_adapters = {name for name in HELP if ":lora_" in name}
    of_drafts = {name for name in HELP if any(part in name for part in (":spec_decode_", ":tenant_", ":drafting_"))}
    assert (len(of_adapters), len(of_drafts)) == (5, 7)
    assert {metric.name for metric in llm.get_metrics()} == set(HELP) - of_adapters - of_drafts


def test_drafts_are_counted_by_drafter_under_vllms_names() -> None:
    config = {"method": "prediction", "num_speculative_tokens": 3, "adaptive": False}
    llm = scripted_llm(disable_log_stats=False, speculative_config=config)[0]
    (plain,) = llm.generate("Hello", SamplingParams(max_tokens=30), use_tqdm=False)
    before = metrics_of(llm)
    params = SamplingParams(max_tokens=30, prediction=plain.outputs[0].token_ids, tenant="acme")
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    found = metrics_of(llm)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    name, drafter = "vllm:spec_decode_num_", "['prediction']"
    assert name + "drafts" + drafter not in before
    (drafts, tokens, accepted) = (
        found[name + kind + drafter] for kind in ("drafts", "draft_tokens", "accepted_tokens")
    )
    assert isinstance(accepted, Counter)
    by_position = found[name + "accepted_tokens_per_pos" + drafter]
    assert isinstance(by_position, Vector)
    assert len(by_position.values) == 3
    assert sum(by_position.values) == accepted.value == len(output.outputs[0].accepted_drafts) > 6
    assert by_position.values == sorted(by_position.values, reverse=True)
    assert drafts.value >= by_position.values[0]  # type: ignore[attr-defined]
    assert tokens.value >= accepted.value  # type: ignore[attr-defined]
    of_tenant = [found[f"quire:tenant_{kind}_tokens['acme']"].value for kind in ("draft", "accepted_draft")]  # type: ignore[attr-defined]
    assert of_tenant == [tokens.value, accepted.value]  # type: ignore[attr-defined]

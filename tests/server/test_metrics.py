"""Metrics: the names that dashboards know, filled from what the engine and its requests tell."""

import json
import mmap
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families

from quire.common.outputs import AdapterStats, DraftStats, EngineStats, RequestMetrics
from quire.common.params import SamplingParams
from quire.config.cache import CacheConfig
from quire.config.lora import LoRAConfig
from quire.engine.metrics import BucketCounts
from quire.kv.prefix_cache.stats import PrefixCacheStats
from quire.server.http.state import RequestContext
from quire.server.operations.metrics import Metrics
from quire.server.operations.model_metrics import ModelMetrics

ROOT = Path(__file__).parents[2]
CACHE = CacheConfig(16, None, None, 0.9, True)
ASKED_FOR = [
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total",
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens", "request_params_n",
    "request_success_total", "iteration_tokens_total", "cache_config_info",
]  # fmt: skip


class Engine:
    """As AsyncLLM; with stats that a test sets."""

    is_running, num_restarts, num_replayed = True, 0, 0
    config = SimpleNamespace(cache=CACHE, lora=None)

    def __init__(self) -> None:
        self.prefix = PrefixCacheStats()
        self.counts = dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"num_blocks": 10}
        self.counts |= {"adapters": {}, "drafts": {}, "tenant_drafts": {}, "drafting_errors": {}}

    @property
    def group(self) -> SimpleNamespace:
        return SimpleNamespace(stats=[self.stats()], running=[self.is_running], pids=[1])

    def stats(self) -> EngineStats:
        return EngineStats(**self.counts | {"prefix_cache": self.prefix.to_dict()})


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def clock():
    return SimpleNamespace(now=100.0)


@pytest.fixture
def refused():
    return Counter()


@pytest.fixture
def of_model(engine, clock):
    return ModelMetrics("tiny", lambda: engine, clock=lambda: clock.now)


@pytest.fixture
def listener(of_model):
    return of_model.engine


@pytest.fixture
def metrics(of_model, refused):
    metrics = Metrics(refused=lambda: refused)
    metrics.add(of_model, "tiny")
    return metrics


def metrics_of(**engines: Engine | None) -> Metrics:
    """The metrics of several models; those of an engine that is None were never loaded."""
    metrics = Metrics()
    for name, engine in engines.items():
        of_model = ModelMetrics(name, lambda engine=engine: engine, is_loaded=lambda engine=engine: engine is not None)
        metrics.add(of_model, name, f"{name}-alias")
    return metrics


def samples(metrics: Metrics) -> dict[str, float]:
    """Every sample by its name and its labels but the model's."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key not in ("model_name", "engine")}
            found[sample.name + (str(sorted(labels.items())) if labels else "")] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name + (str(sorted(labels.items())) if labels else "")]


def scraped_names(metrics: Metrics) -> set[str]:
    return set(re.findall(r"^# TYPE (\S+) ", metrics.render()[0].decode(), re.MULTILINE))


MOMENTS = RequestMetrics(arrival_time=100.0, first_scheduled_time=101.0, first_token_time=103.0, finished_time=109.0)


def test_the_names_that_are_asked_for_are_there_with_vllms_labels(metrics):
    names = scraped_names(metrics)
    assert {f"vllm:{name}" for name in ASKED_FOR} <= names
    text = metrics.render()[0].decode()
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in text
    assert 'num_gpu_blocks="10"' in text


def test_a_request_is_measured_from_its_arrival_to_its_end(metrics, listener, clock):
    listener.on_request_start("r", 12, SamplingParams(n=2, max_tokens=50))
    listener.on_tokens("r", 1, 103.0)
    listener.on_tokens("r", 2, 104.0)
    listener.on_tokens("r", 1, 106.0)
    clock.now = 109.5
    listener.on_request_end("r", MOMENTS, 4, "stop", 3)
    found = samples(metrics)
    sums = {
        "time_to_first_token_seconds": 3.0, "inter_token_latency_seconds": 3.0, "time_per_output_token_seconds": 3.0,
        "request_time_per_output_token_seconds": 1.0, "e2e_request_latency_seconds": 9.5,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0, "request_decode_time_seconds": 6.0, "request_inference_time_seconds": 8.0,
        "request_prompt_tokens": 12, "request_generation_tokens": 4, "request_params_n": 2,
        "request_max_num_generation_tokens": 3, "request_params_max_tokens": 50,
    }  # fmt: skip
    assert {name: found[f"vllm:{name}_sum"] for name in sums} == sums
    assert found["vllm:inter_token_latency_seconds_count"] == 2
    assert found["vllm:e2e_request_latency_seconds_count"] == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0


def test_a_request_that_fails_early_is_counted_and_forgotten(metrics, listener):
    listener.on_request_start("r", 12, SamplingParams())
    listener.on_request_end("r", RequestMetrics(100.0), 0, "error", 0)
    listener.on_request_end("r", RequestMetrics(100.0), 0, "error", 0)
    listener.on_tokens("r", 1, 101.0)
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 1
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0


def test_a_step_counts_what_it_brought(metrics, listener, engine):
    """Also the first one."""
    engine.counts |= {"num_prompt_tokens": 100, "num_generated_tokens": 3}
    listener.on_step(engine.stats())
    listener.on_step(engine.stats())
    assert value(metrics, "vllm:iteration_tokens_total_sum") == 103
    assert value(metrics, "vllm:iteration_tokens_total_count") == 1


def test_the_cache_is_shown_by_state_and_reason(metrics, engine):
    engine.counts |= {"num_used_blocks": 4, "num_cached_blocks": 5, "num_preemptions": 2, "num_running": 3}
    engine.prefix.num_evicted_tokens = 16
    shown = samples(metrics)
    blocks = {state: value(metrics, "quire:kv_cache_blocks", state=state) for state in ("free", "cached", "owned")}
    assert blocks == {"free": 1, "cached": 5, "owned": 4}
    assert shown["vllm:kv_cache_usage_perc"] == 0.4
    assert shown["vllm:num_preemptions_total"] == 2
    assert shown["quire:prefix_cache_evicted_tokens_total"] == 16
    assert value(metrics, "quire:prefix_cache_missed_tokens_total", reason="never_seen") == 0
    assert value(metrics, "quire:prefix_cache_hit_tokens_total", source="device") == 0


def test_answers_and_refusals_are_counted(metrics, refused):
    for status in (200, 200, 404):
        metrics.on_http_response(
            RequestContext(request_id="r", method="GET", route="/v1/models/{model}", status=status)
        )
    refused["queue_full"] += 3
    labels = {"route": "/v1/models/{model}", "method": "GET"}
    assert value(metrics, "quire:http_requests_total", status="200", **labels) == 2
    assert value(metrics, "quire:http_requests_total", status="404", **labels) == 1
    assert value(metrics, "quire:requests_refused_total", reason="queue_full") == 3


def test_an_engine_that_is_gone_shows(engine):
    engine.is_running, engine.num_restarts, engine.num_replayed = False, 2, 5
    metrics = metrics_of(tiny=engine)
    assert value(metrics, "quire:engine_up") == 0
    assert value(metrics, "quire:engine_restarts_total") == 2
    assert value(metrics, "quire:requests_replayed_total") == 5


def test_a_name_with_quotes_stays_one_label(engine):
    metrics = metrics_of(**{'a"b\\c\nd': engine})
    (family,) = [f for f in text_string_to_metric_families(metrics.render()[0].decode()) if f.name == "quire:engine_up"]
    assert family.samples[0].labels["model_name"] == 'a"b\\c\nd'


def test_two_servers_in_a_process_do_not_meet(engine):
    assert metrics_of(a=engine).registry is not metrics_of(b=engine).registry


def use_adapters(engine):
    engine.config = SimpleNamespace(cache=CACHE, lora=LoRAConfig(3, 16))
    engine.counts["adapters"] = {"sql": AdapterStats(0, 2, 30, 4), "json": AdapterStats(1, 0, 5, 6)}


def test_adapters_are_counted_by_name(engine, metrics):
    assert "lora" not in metrics.render()[0].decode()
    use_adapters(engine)
    text = metrics.render()[0].decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (info,) = families["vllm:lora_requests_info"].samples
    named = {key: info.labels[key] for key in ("running_lora_adapters", "waiting_lora_adapters", "max_lora")}
    assert named == {"running_lora_adapters": "sql", "waiting_lora_adapters": "json", "max_lora": "3"}
    found = {
        name.removeprefix("quire:lora_"): {s.labels["lora_name"]: s.value for s in family.samples}
        for name, family in families.items()
        if name.startswith("quire:lora_")
    }
    assert found == {
        "requests_running": {"sql": 2, "json": 0},
        "requests_waiting": {"sql": 0, "json": 1},
        "prompt_tokens": {"sql": 30, "json": 5},
        "generation_tokens": {"sql": 4, "json": 6},
    }


def use_drafts(engine):
    engine.counts["drafts"] = {"prediction": DraftStats([3, 1], 4, 7), "own": DraftStats([2, 0], 2, 2)}
    engine.counts["tenant_drafts"] = {"team": DraftStats([5, 1], 6, 9)}
    engine.counts["drafting_errors"] = {"model": 3, "": 1}


def test_drafts_are_counted_by_drafter_and_position(engine, metrics):
    assert "spec_decode" not in metrics.render()[0].decode()
    use_drafts(engine)
    families = text_string_to_metric_families(metrics.render()[0].decode())
    found = {
        (family.name.removeprefix("vllm:spec_decode_num_"), s.labels["drafter"], s.labels.get("position")): s.value
        for family in families
        if "spec_decode" in family.name
        for s in family.samples
    }
    assert found == {
        ("drafts", "prediction", None): 4,
        ("drafts", "own", None): 2,
        ("draft_tokens", "prediction", None): 7,
        ("draft_tokens", "own", None): 2,
        ("accepted_tokens", "prediction", None): 4,
        ("accepted_tokens", "own", None): 2,
        ("accepted_tokens_per_pos", "prediction", "0"): 3,
        ("accepted_tokens_per_pos", "prediction", "1"): 1,
        ("accepted_tokens_per_pos", "own", "0"): 2,
        ("accepted_tokens_per_pos", "own", "1"): 0,
    }


def test_errors_that_cost_drafts_are_counted_by_drafter(engine, metrics):
    use_drafts(engine)
    text = metrics.render()[0].decode()
    counts = dict(re.findall(r'quire:drafting_errors_total\{drafter="(\w*)".*\} (\d+)', text))
    assert counts == {"model": "3", "": "1"}


def test_several_models_share_families_and_differ_in_their_label(engine, clock):
    other = Engine()
    other.counts["num_running"] = 4
    metrics = metrics_of(a=engine, b=other, c=None)
    for model in ("b-alias", "b", "", "unknown"):
        metrics.on_http_response(
            RequestContext(request_id="r", method="POST", route="/v1/completions", model=model, status=200)
        )
    text = metrics.render()[0].decode()
    types = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(types) == len(set(types))
    families = {family.name: family for family in text_string_to_metric_families(text)}

    def by_model(name: str) -> dict[str, float]:
        return {sample.labels["model_name"]: sample.value for sample in families[name].samples}

    assert by_model("vllm:num_requests_running") == {"a": 0, "b": 4}
    assert by_model("quire:model_loaded") == {"a": 1, "b": 1, "c": 0}
    assert by_model("quire:engine_up") == {"a": 1, "b": 1}
    assert by_model("quire:http_requests") == {"a": 2, "b": 2}
    assert {s.labels["model_name"] for s in families["vllm:time_to_first_token_seconds"].samples} == {"a", "b"}


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, "text/plain"),
        ("application/openmetrics-text; version=1.0.0", "openmetrics"),
        ("application/openmetrics-text; version=latest", "text/plain"),
        ("text/plain; version=0.0.4a", "text/plain"),
        ("application/openmetrics-text", "openmetrics"),
        ("application/openmetrics-text; version=0.0.1", "text/plain"),
        ("text/plain; version=x, application/openmetrics-text; q=0.5; version=1.0.0", "openmetrics"),
    ],
)
def test_the_format_is_the_one_that_is_asked_for(metrics, accept, expected):
    body, content_type = metrics.render(accept)
    assert expected in content_type
    assert body.endswith(b"# EOF\n") is (expected == "openmetrics")
    parse = openmetrics_families if expected == "openmetrics" else text_string_to_metric_families
    assert {family.name for family in parse(body.decode())} > {"vllm:num_requests_running", "vllm:prompt_tokens"}
    assert b"\nvllm:time_to_first_token_seconds_bucket{" in body


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_each_value_once(values):
    histogram = BucketCounts([0.5, 1, 50])
    for number in values:
        histogram.observe(number)
    expected = [("0.5", 0.5), ("1.0", 1), ("50.0", 50), ("+Inf", float("inf"))]
    assert histogram.cumulative() == {name: sum(v <= bound for v in values) for name, bound in expected}
    assert histogram.sum == sum(values)


def test_every_metric_is_documented_and_no_other(engine, metrics):
    use_adapters(engine)
    use_drafts(engine)
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `((?:vllm|quire):\w+)`", text, re.MULTILINE))
    assert documented == {name for name in scraped_names(metrics) if ":" in name}


def test_the_dashboard_asks_for_metrics_that_exist(metrics):
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "quire.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(queries) > 15
    asked = {name for query in queries for name in re.findall(r"\b(?:(?:vllm|quire):|process_)\w+", query)}
    names = {
        re.sub(r"_(bucket|sum|count)$", "", name) if "_seconds" in name or "_tokens" in name else name for name in asked
    }
    known = scraped_names(metrics)
    assert {name for name in names if name not in known} == set()
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_drafts_are_counted_by_tenant(engine, metrics):
    use_drafts(engine)
    text = metrics.render()[0].decode()
    found = dict(re.findall(r"^quire:tenant_(\w+)_total\{[^}]*tenant=\"team\"[^}]*\} ([0-9.]+)$", text, re.MULTILINE))
    assert found == {"draft_tokens": "9.0", "accepted_draft_tokens": "6.0"}


def test_memory_is_counted_in_the_machines_pages(metrics, monkeypatch):
    before = value(metrics, "quire:process_memory_bytes", process="engine")
    monkeypatch.setattr(mmap, "PAGESIZE", 16 * mmap.PAGESIZE)
    assert value(metrics, "quire:process_memory_bytes", process="engine") > 8 * before > 0

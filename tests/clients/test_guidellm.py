"""guidellm, a load generator, against a real server at several rates."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.served import CHECKPOINT, KEY, MODEL, Served

RATES = [10, 40]
NUM_REQUESTS = 12
OUTPUT_LEN = 8
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def scenario(served: Served, request_format: str, report: Path) -> dict[str, object]:
    return {
        "metadata": {"name": "quire"},
        "spec": {
            "backend": {
                "kind": "openai_http",
                "target": served.url,
                "api_key": KEY,
                "model": MODEL,
                "request_format": request_format,
            },
            "profile": {"kind": "constant", "rate": RATES},
            "constraints": [{"kind": "max_requests", "count": NUM_REQUESTS}],
            "tokenizer": {"kind": "huggingface_auto", "model": str(CHECKPOINT)},
            "data": [{"kind": "synthetic_text", "prompt_tokens": 48, "output_tokens": OUTPUT_LEN}],
            "outputs": [{"kind": "json", "path": str(report)}],
        },
    }


@pytest.mark.parametrize("request_format", ["/v1/completions", "/v1/chat/completions"])
def test_all_requests_succeed_and_both_count_the_same_tokens(
    served: Served, request_format: str, tmp_path: Path
) -> None:
    report, config = tmp_path / "report.json", tmp_path / "scenario.json"
    config.write_text(json.dumps(scenario(served, request_format, report)))
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [served.metric(name) for name in names]
    run = subprocess.run(
        [sys.executable, "-m", "guidellm", "run", "--config", config, "--disable-console"],
        env=os.environ | OFFLINE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    served.wait_until_idle()
    benchmarks = json.loads(report.read_text())["benchmarks"]
    requests = [request for benchmark in benchmarks for request in benchmark["requests"]["successful"]]
    assert [len(benchmark["requests"]["errored"]) for benchmark in benchmarks] == [0] * len(RATES)
    assert len(requests) == NUM_REQUESTS * len(RATES)
    assert {request["output_tokens"] for request in requests} == {OUTPUT_LEN}
    counted = [sum(request[name] for request in requests) for name in ("prompt_tokens", "output_tokens")]
    assert [served.metric(name) - start for name, start in zip(names, before, strict=True)] == counted

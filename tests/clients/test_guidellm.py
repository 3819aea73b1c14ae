"""guidellm, a load generator, against a real server at several rates."""

import json
from pathlib import Path

from tests.clients.documented import run_command
from tests.clients.served import CHECKPOINT, Served

RATES = [10, 40]
NUM_REQUESTS = 12
OUTPUT_LEN = 8


def test_all_requests_succeed_and_both_count_the_same_tokens(served: Served, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
    before = [served.metric(name) for name in names]
    changes = {"report.json": str(report), "src/quire/models/embedded/quire-tiny": str(CHECKPOINT)}
    run_command("guidellm", served, changes, GUIDELLM__MAX_WORKER_PROCESSES="1")
    served.wait_until_idle()
    benchmarks = json.loads(report.read_text())["benchmarks"]
    requests = [request for benchmark in benchmarks for request in benchmark["requests"]["successful"]]
    assert [len(benchmark["requests"]["errored"]) for benchmark in benchmarks] == [0] * len(RATES)
    assert len(requests) == NUM_REQUESTS * len(RATES)
    assert {request["output_tokens"] for request in requests} == {OUTPUT_LEN}
    counted = [sum(request[name] for request in requests) for name in ("prompt_tokens", "output_tokens")]
    assert [served.metric(name) - start for name, start in zip(names, before, strict=True)] == counted

"""`vllm bench serve`, vLLM's load generator, from its source archive against a real server."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.clients.served import CHECKPOINT, KEY, MODEL, Served
from tests.clients.vllm_examples import FOLDER

SOURCES = FOLDER.parent
PROGRAM = Path(__file__).parent / "apart" / "run_vllm_bench.py"
NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 12, 40, 24


def run(served: Served, folder: Path) -> None:
    """Write vLLM's results into the folder."""
    if not SOURCES.exists():
        assert "CI" not in os.environ, "CI must test this client: make .venv/.clients"
        pytest.skip(f"there is no {SOURCES}: `make .venv/.clients` downloads it")
    given = {"--base-url": served.url, "--model": MODEL, "--tokenizer": str(CHECKPOINT), "--dataset-name": "random"}
    lengths = {"--num-prompts": NUM_PROMPTS, "--random-input-len": INPUT_LEN, "--random-output-len": OUTPUT_LEN}
    flags = [part for name, value in (given | lengths).items() for part in (name, str(value))]
    command = [sys.executable, str(PROGRAM), *flags, "--ignore-eos", "--save-result", "--result-dir", str(folder)]
    paths = os.pathsep.join((str(SOURCES), str(SOURCES / "packages")))
    own = {"PYTHONPATH": paths, "OPENAI_API_KEY": KEY, "HOME": str(folder), "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_all_requests_succeed_and_both_count_the_same_tokens(served: Served, tmp_path: Path) -> None:
    before = served.metric("vllm:generation_tokens_total")
    run(served, tmp_path)
    served.wait_until_idle()
    results = {found["backend"]: found for found in map(json.loads, map(Path.read_text, tmp_path.glob("*.json")))}
    assert results.keys() == {"openai", "openai-chat"}
    for found in results.values():
        assert (found["completed"], found["failed"]) == (NUM_PROMPTS, 0)
        assert found["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
        assert found["median_ttft_ms"] > 0
    assert served.metric("vllm:generation_tokens_total") - before == len(results) * NUM_PROMPTS * OUTPUT_LEN

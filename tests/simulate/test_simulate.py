"""The simulator: replayable, in step with what any schedule must give, and strict about its input."""

import json

import pytest

from quire.cli import main
from quire.config.kv_cache import KVCacheSpec
from quire.config.kv_layout import kv_cache_config
from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError
from quire.simulate.report import report
from quire.simulate.simulator import Simulator
from quire.simulate.trace import TraceRequest, read_trace, synthetic_trace

SPEC = KVCacheSpec(1, 2, "float32")


def simulate(trace, *, num_blocks=4096, num_host_blocks=0, mode=None, caching=True, tokens=2048):
    cache = kv_cache_config([SPEC], 16, num_blocks=num_blocks, host_bytes=num_host_blocks * 16 * SPEC.bytes_per_token)
    simulator = Simulator(cache, SchedulerConfig(64, tokens, mode), enable_prefix_caching=caching)
    simulator.run(trace)
    simulator.blocks.check_integrity()
    assert simulator.blocks.num_used_blocks == 0
    return report(simulator)


@pytest.mark.parametrize("seed", range(20))
def test_every_schedule_gives_the_same_outputs(seed):
    def trace():
        return synthetic_trace(seed, 60, requests_per_s=20.0)

    roomy = simulate(trace(), caching=False)
    assert roomy["preemptions"] == 0
    for options in (
        {"num_blocks": 130},
        {"num_blocks": 130, "caching": False, "tokens": 100},
        {"num_blocks": 130, "num_host_blocks": 400, "mode": "swap"},
    ):
        tight = simulate(trace(), **options)
        assert tight["outputs_digest"] == roomy["outputs_digest"]
        assert tight["requests"] == 60
    assert tight["preemptions"] > 0
    assert tight["swapped_blocks"] > 0


def test_one_seed_is_one_run_to_the_byte(capsys):
    printed = []
    for seed in (1, 1, 2):
        assert main(["simulate", "--seed", str(seed), "--requests", "100", "--json"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] != printed[2]
    assert json.loads(printed[0])["requests"] == 100


def test_waste_is_small_and_shared_prefixes_hit():
    figures = simulate(synthetic_trace(3, 300))
    assert 0 < figures["kv_waste"] < 0.06
    assert figures["prefix_hit_rate"] > 0.15


def test_a_trace_is_read_from_a_file(tmp_path, capsys):
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival_s": i, "prompt_len": 40, "output_len": 3, "prefix_group": 1, "prefix_len": 32} for i in range(5)]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert main(["simulate", "--trace", str(path)]) == 0
    assert "prefix_hit_rate      0.64" in capsys.readouterr().out  # four of five find 32 of 40 tokens


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "malformed"),
        ('{"arrival_s": 0, "prompt_len": 0, "output_len": 1}', ">= 1"),
        ('{"arrival_s": 0, "prompt_len": 5, "output_len": -1}', ">= 1"),
        ('{"arrival_s": -1, "prompt_len": 5, "output_len": 1}', ">= 0"),
        ('{"arrival_s": 0, "prompt_len": 99999999999, "output_len": 1}', "<= 10000000"),
        ('{"arrival_s": 0, "prompt_len": 5}', "output_len"),
        ('{"arrival_s": 0, "prompt_len": 5, "output_len": 1, "colour": 3}', "colour"),
        ('{"arrival_s": 0, "prompt_len": "5", "output_len": 1}', "prompt_len"),
    ],
)
def test_a_wrong_line_is_refused_and_numbered(tmp_path, line, message):
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival_s": 0, "prompt_len": 5, "output_len": 1}\n' + line + "\n")
    with pytest.raises(ConfigError, match=f"line 2.*{message}"):
        list(read_trace(path))


def test_arrivals_out_of_order_and_missing_files_are_refused(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival_s": 2, "prompt_len": 5, "output_len": 1}\n{"arrival_s": 1, "prompt_len": 5, "output_len": 1}'
    )
    with pytest.raises(ConfigError, match="line 2: arrival_s 1"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(tmp_path / "nothing"))


def test_a_request_that_never_fits_is_counted_and_the_others_run():
    trace = [TraceRequest(0.0, 100, 3), TraceRequest(0.0, 10_000, 3), TraceRequest(1.0, 100, 3)]
    figures = simulate(trace, num_blocks=20)
    assert (figures["requests"], figures["ignored"]) == (2, 1)


@pytest.mark.parametrize("flag", ["--requests", "--block-size", "--num-blocks", "--max-num-seqs", "--requests-per-s"])
def test_sizes_of_zero_are_refused(flag, capsys):
    assert main(["simulate", flag, "0"]) == 2
    assert capsys.readouterr().err.startswith("quire: ")

"""`quire simulate --engines` and `quire plan --fleet`."""

import json
from pathlib import Path

import msgspec
import pytest

from quire.cli import main
from quire.interfaces.simulate.workloads import dataset_trace

SIMULATE = ["simulate", "--requests", "40", "--requests-per-s", "12", "--num-blocks", "500"]


@pytest.fixture
def costs(tmp_path):
    """A machine whose steps take 20 ms, and 1 ms for each token."""
    rows = [("prefill", 1, n, 0) for n in (16, 256)] + [("decode", n, n, 64) for n in (1, 16)]
    names = ("kind", "num_seqs", "num_tokens", "context")
    lines = [dict(zip(names, row, strict=True)) | {"step_ms": 20 + row[2]} for row in rows]
    (tmp_path / "costs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(tmp_path / "costs.jsonl")


@pytest.fixture
def trace(tmp_path):
    lines = [msgspec.json.encode(request) for request in dataset_trace(100, 10, 1, 40, 10.0)]
    (tmp_path / "trace.jsonl").write_bytes(b"\n".join(lines))
    return str(tmp_path / "trace.jsonl")


def plan(trace, costs, *more, slo="ttft=650ms,itl=150ms"):
    limits = ["--num-gpu-blocks-override", "500", "--max-num-seqs", "16", "--max-engines", "8"]
    return main(["plan", "--fleet", trace, "--costs", costs, "--slo", slo, *limits, *more])


def test_one_seed_is_one_fleet_to_the_byte(capsys, tmp_path, costs):
    outputs = []
    for _ in range(2):
        options = ["--engines", "2", "--max-engines", "4", "--target-requests", "3", "--start-s", "1"]
        deaths = ["--deaths", "1:0", "--death-rate", "60", "--costs", costs, "--plot", str(tmp_path / "a.svg")]
        assert main([*SIMULATE, *options, *deaths, "--json"]) == 0
        outputs.append((capsys.readouterr().out, (tmp_path / "a.svg").read_bytes()))
    assert outputs[0] == outputs[1]
    report = json.loads(outputs[0][0])
    assert report["requests"] == 40
    assert report["deaths"] >= 1


def test_the_smallest_fleet_keeps_the_limits_and_a_smaller_one_does_not(capsys, tmp_path, trace, costs):
    assert plan(trace, costs, "--json", "--plot", str(tmp_path / "curve.png")) == 0
    found = json.loads(capsys.readouterr().out)
    engines, curve = found["smallest"]["engines"], {point["engines"]: point for point in found["curve"]}
    assert 1 < engines <= 8
    assert curve[engines]["ttft_s"] <= 0.65
    assert curve[engines]["itl_s"] <= 0.15
    assert curve[engines - 1]["excess"] > 1
    assert curve[engines]["share"] > 0.9 > curve[1]["share"]
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "own", "other"),
    [
        ("model", "/models/quire-tiny", "org/other"),
        ("dtype", "float32", "bfloat16"),
        ("quantization", "none", "int8"),
        ("num_threads", 2, 3),
    ],
)
def test_costs_of_other_engines_are_refused(capsys, trace, costs, name, own, other):
    planned = ["--model", "quire-tiny", "--dtype", "float32", "--num-threads", "2"]
    lines = Path(costs).read_text().splitlines()
    Path(costs).write_text("\n".join([json.dumps(json.loads(line) | {name: own}) for line in lines]))
    assert plan(trace, costs, *planned) == 0
    Path(costs).write_text("\n".join([json.dumps(json.loads(line) | {name: other}) for line in lines]))
    assert plan(trace, costs, *planned) == 2
    shown = "quire-tiny" if name == "model" else own
    assert f"was measured with {name} {other}, but the engines are planned with {shown}" in capsys.readouterr().err


def test_a_degree_of_parallelism_saves_engines(capsys, trace, costs):
    assert plan(trace, costs, "--degrees", "1,2", "--parallel-efficiency", "0.9") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["degree", "engines", "p95", "ttft", "p95", "itl", "in", "limits", "busy"]
    assert {line.split()[0] for line in lines[1:-1]} == {"1", "2"}
    assert lines[-1].startswith("smallest fleet: ")


def test_limits_that_no_fleet_keeps_are_named_with_what_is_reached(capsys, trace, costs):
    assert plan(trace, costs, slo="itl=1ms") == 2
    error = capsys.readouterr().err
    assert "no fleet keeps itl=0.001s at percentile 95: the nearest is" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("slo", ["", "ttft", "ttft=1", "ttft=0s", "ttft=1s,ttft=2s", "x=1s", "itl=-1s", "itl=1s,"])
def test_limits_that_cannot_be_are_refused(capsys, trace, costs, slo):
    assert plan(trace, costs, slo=slo) == 2
    assert "give ttft, itl or both, once, with a unit" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--percentile", "0"], "must be from 1 to 100"),
        (["--degrees", "1,x"], "give numbers of at least 1"),
        (["--degrees", "0"], "give numbers of at least 1"),
        (["--degrees", "2"], "no rows of tensor_parallel_size 2"),
        (["--max-engines", "0"], "must be from 1 to 1000"),
        (["--data-parallel-size", "2"], "leave out --data-parallel-size"),
        (["--plot", "a.txt"], "the name must end in"),
    ],
)
def test_options_that_cannot_be_are_refused(capsys, trace, costs, more, problem):
    assert plan(trace, costs, *more) == 2
    assert problem in capsys.readouterr().err


def test_traces_that_cannot_be_planned_for_are_refused(capsys, tmp_path, costs):
    (tmp_path / "empty").write_text("")
    (tmp_path / "wrong").write_text('{"arrival_s": 0}\n')
    (tmp_path / "large").write_text('{"arrival_s": 0, "prompt_len": 9000, "output_len": 1}\n')
    for name, problem in (("empty", "has no requests"), ("wrong", "line 1"), ("large", "no request of the trace fits")):
        assert plan(str(tmp_path / name), costs) == 2
        assert problem in capsys.readouterr().err
    assert main(["plan", "--fleet", str(tmp_path / "empty")]) == 2
    assert "--fleet needs --slo" in capsys.readouterr().err
    assert main(["plan", "--slo", "ttft=1s"]) == 2
    assert "give --fleet TRACE as well" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--max-engines", "3"], "give --engines as well"),
        (["--engines", "0"], "--engines 0: must be from 1 to 1000"),
        (["--engines", "-2"], "--engines -2: must be from 1 to 1000"),
        (["--engines", "2", "--max-engines", "0"], "from 2 to 0 engines: numbers must ascend"),
        (["--engines", "2", "--deaths", "x"], "SECONDS:ENGINE pairs"),
        (["--engines", "2", "--deaths", "1:1,2:9"], "there is no engine 9, --engines 2 are 0 to 1"),
        (["--engines", "2", "--start-s", "-1"], "must be from 0 to 1e9"),
        (["--tensor-parallel-size", "2"], "need --costs"),
    ],
)
def test_fleets_that_cannot_be_are_refused(capsys, options, problem):
    assert main([*SIMULATE, *options]) == 2
    assert problem in capsys.readouterr().err

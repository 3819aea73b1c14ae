"""Trace files: what is refused, and that the line is named; synthetic traces: the shapes they promise."""

import json
from itertools import islice
from statistics import mean

import pytest

from quire.cli import main
from quire.common.errors import ConfigError
from quire.interfaces.simulate.trace import TraceRequest, read_trace
from quire.interfaces.simulate.workloads import SHAPES, chat_trace, synthetic_trace, tenants_trace

GOOD = {"arrival_s": 0, "prompt_len": 5, "output_len": 1}


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "malformed"),
        ("[]", "object"),
        ('{"arrival_s": 0, "prompt_len": 5', "truncated"),
        ({"arrival_s": 0, "prompt_len": 5}, "output_len"),
        ({**GOOD, "prompt_len": 0}, ">= 1"),
        ({**GOOD, "output_len": -1}, ">= 1"),
        ({**GOOD, "arrival_s": -1}, ">= 0"),
        ({**GOOD, "arrival_s": 1e300}, "<= 1000000000000"),
        ({**GOOD, "prompt_len": 99999999999}, "<= 10000000"),
        ({**GOOD, "colour": 3}, "colour"),
        ({**GOOD, "prompt_len": "5"}, "prompt_len"),
        ({**GOOD, "tenant": ""}, "tenant"),
        ({**GOOD, "tenant": "x" * 65}, "tenant"),
        ({**GOOD, "priority": "high"}, "priority"),
        ({**GOOD, "n": 0}, "n"),
        ({**GOOD, "n": 65}, "<= 64"),
        ({**GOOD, "beam_width": 0}, "beam_width"),
        ({**GOOD, "n": 2, "beam_width": 2}, "only one"),
        ({**GOOD, "session": -1}, "session"),
        ({**GOOD, "prefix_group": 1}, "give both"),
        ({**GOOD, "prefix_len": 2}, "give both"),
        ({**GOOD, "prefix_group": 1, "prefix_len": 6}, "at most prompt_len, 5"),
        ({**GOOD, "think_s": 1}, "session"),
        ({**GOOD, "session": 7, "prefix_group": 1, "prefix_len": 2}, "first turn of session 7"),
    ],
)
def test_a_wrong_line_is_refused_and_numbered(tmp_path, line, message):
    path = write(tmp_path / "trace.jsonl", {**GOOD, "session": 7}, line)
    with pytest.raises(ConfigError, match=rf"trace\.jsonl, line 2: .*{message}"):
        list(read_trace(path))


def test_arrivals_out_of_order_and_missing_files_are_refused(tmp_path):
    path = write(tmp_path / "trace.jsonl", {**GOOD, "arrival_s": 2}, {**GOOD, "arrival_s": 1})
    with pytest.raises(ConfigError, match="line 2: arrival_s=1"):
        list(read_trace(path))
    with pytest.raises(ConfigError, match="cannot read"):
        list(read_trace(tmp_path / "nothing"))


def test_every_field_is_read(tmp_path):
    line = {
        **GOOD,
        "prefix_group": 3,
        "prefix_len": 4,
        "tenant": "a",
        "priority": -2,
        "n": 4,
        "session": 1,
        "think_s": 2,
    }
    (request,) = read_trace(write(tmp_path / "trace.jsonl", line))
    assert request == TraceRequest(0, 5, 1, 3, 4, "a", -2, 4, 1, 1, 2)


def test_prompts_of_one_group_begin_alike_and_others_do_not():
    def prompt(index, group, prefix_len):
        return TraceRequest(0, 50, 1, group, prefix_len).prompt_token_ids(index)

    assert prompt(0, 1, 30)[:20] == prompt(1, 1, 20)[:20]
    assert prompt(0, 1, 30)[30:] != prompt(1, 1, 30)[30:]
    assert prompt(0, 1, 30)[:30] != prompt(0, 32_001, 30)[:30]


@pytest.mark.parametrize(
    ("shape", "prompt_len", "output_len"), [("alpaca", 19.31, 58.45), ("sharegpt", 161.31, 337.99)]
)
def test_lengths_have_the_means_of_the_paper(shape, prompt_len, output_len):
    trace = list(synthetic_trace(1, 20_000, shape=shape))
    assert mean(request.prompt_len for request in trace) == pytest.approx(prompt_len, rel=0.04)
    assert mean(request.output_len for request in trace) == pytest.approx(output_len, rel=0.04)


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes_follow_the_seed_the_count_and_the_width(shape):
    first, again, other = (list(synthetic_trace(seed, 50, shape=shape, n=3)) for seed in (1, 1, 2))
    assert first == again != other
    assert len(first) == 50
    assert all(request.n == 3 for request in first)
    arrivals = [request.arrival_s for request in first]
    assert arrivals == sorted(arrivals)


def test_chats_share_one_system_prompt_and_have_all_their_turns():
    trace = list(chat_trace(0))
    assert len(trace) == 32 * 8 == len(list(synthetic_trace(0, shape="chat")))
    firsts = [request for request in trace if request.prefix_len]
    assert [(r.session, r.prefix_group, r.prefix_len) for r in firsts] == [(user, 0, 1000) for user in range(32)]
    assert all(request.prompt_len > 1000 for request in firsts)
    assert len({request.output_len for request in trace}) > 20
    assert len(list(chat_trace(0, users=3, turns=2, system_len=0))) == 6


def test_one_tenant_floods():
    names = [request.tenant for request in islice(tenants_trace(0, 1000), 1000)]
    assert set(names) == {"flood", "steady-1", "steady-2"}
    assert names.count("flood") > 5 * names.count("steady-1") > 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--requests", "0"],
        ["--requests-per-s", "0"],
        ["--requests-per-s", "nan"],
        ["--shape", "round"],
        ["--n", "0"],
        ["--n", "65"],
        ["--beam-width", "0"],
        ["--n", "2", "--beam-width", "2"],
        ["--trace", "nothing.jsonl"],
        ["--trace", "nothing.jsonl", "--n", "2"],
        ["--block-size", "0"],
        ["--num-blocks", "0"],
        ["--num-host-blocks", "-1"],
        ["--max-num-seqs", "0"],
        ["--policy", "best"],
        ["--tenant-weights", "a=0"],
        ["--target-step-ms", "0"],
        ["--preemption-mode", "never"],
        ["--plot", "picture.pdf"],
        ["--plot", "no/such/folder/picture.svg"],
    ],
)
def test_wrong_options_are_one_line_on_standard_error(arguments, capsys):
    assert main(["simulate", "--json", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("quire: ")
    assert printed.err.count("\n") == 1

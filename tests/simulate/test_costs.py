"""Costs of steps from measured rows."""

import json
from types import SimpleNamespace

import pytest

from quire.common.errors import ConfigError
from quire.interfaces.simulate.fleet.costs import read_costs


def truth(num_tokens, num_seqs, context, pairs):
    return 0.010 + 0.0005 * num_tokens + 0.0002 * num_seqs + 1e-6 * context * num_seqs + 2e-7 * pairs


def rows(degree=1, scale=1.0):
    for num_tokens in (16, 64, 256):
        for seqs in (1, 4):
            pairs = num_tokens * num_tokens / seqs / 2
            yield "prefill", seqs, num_tokens, 0, scale * truth(num_tokens, seqs, 0, pairs), degree
    for seqs in (1, 4, 16):
        for context in (64, 512):
            yield "decode", seqs, seqs, context, scale * truth(seqs, seqs, context, 0), degree


def write(path, *groups):
    names = ("kind", "num_seqs", "num_tokens", "context", "step_s", "tensor_parallel_size")
    found = [dict(zip(names, row, strict=True)) for group in groups for row in group]
    path.write_text(
        "".join(json.dumps(row | {"step_ms": 1e3 * row.pop("step_s"), "model": "m"}) + "\n" for row in found)
    )
    return path


def batch(*sequences):
    """Of (start, tokens) pairs, all of which draw."""
    drawn = SimpleNamespace(num_rows=1)
    made = [SimpleNamespace(start=start, token_ids=(0,) * num, drawn=drawn) for start, num in sequences]
    return SimpleNamespace(sequences=made, transfers=())


def test_a_curve_gives_the_times_that_were_measured(tmp_path):
    curve = read_costs(write(tmp_path / "costs", rows()))
    assert curve.seconds(batch((0, 64))) == pytest.approx(truth(64, 1, 0, 2048), rel=0.02)
    assert curve.seconds(batch(*[(0, 64)] * 4)) == pytest.approx(truth(256, 4, 0, 8192), rel=0.02)
    assert curve.seconds(None, 4, 4 * 512) == pytest.approx(truth(4, 4, 512, 0), rel=0.02)
    assert curve.seconds(None, 4, 4 * 512) == curve.seconds(batch(*[(512, 1)] * 4))
    beside = curve.seconds(batch((0, 64), (32, 16)), 4, 4 * 512)
    assert beside == curve.seconds(batch(*[(512, 1)] * 4, (0, 64), (32, 16)))
    between = curve.seconds(batch((0, 160)))
    assert curve.seconds(batch((0, 64))) < between < curve.seconds(batch((0, 256)))
    assert curve.seconds(batch((0, 1000))) == pytest.approx(truth(1000, 1, 0, 500_000), rel=0.1)
    assert curve.seconds(batch()) == 0


def test_a_step_with_a_prompt_takes_longer_than_decodes_of_as_many_tokens(tmp_path):
    longer = [(kind, *row, step_s + 0.008 * (kind == "prefill"), degree) for kind, *row, step_s, degree in rows()]
    curve = read_costs(write(tmp_path / "costs", longer))
    assert curve.seconds(batch((0, 16))) == pytest.approx(truth(16, 1, 0, 128) + 0.008, rel=0.02)
    assert curve.seconds(None, 16, 16 * 64) == pytest.approx(truth(16, 16, 64, 0), rel=0.02)


def test_engines_of_more_ranks_are_measured_or_scaled(tmp_path):
    path = write(tmp_path / "costs", rows(), rows(2, 0.6))
    one, two = read_costs(path), read_costs(path, 2)
    assert two.seconds(None, 4, 256) == pytest.approx(0.6 * one.seconds(None, 4, 256), rel=0.02)
    scaled = read_costs(path, 4, 0.8)
    assert scaled.seconds(None, 4, 256) == pytest.approx(one.seconds(None, 4, 256) / 3.2)
    with pytest.raises(ConfigError, match="no rows of tensor_parallel_size 4, only of 1, 2"):
        read_costs(path, 4)
    with pytest.raises(ConfigError, match="more than 0 and at most 1"):
        read_costs(path, 4, 1.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "has no rows"),
        ("x\n", "line 1"),
        ('{"kind": "other"}\n', "line 1"),
        (
            '\n{"kind": "decode", "num_seqs": 1, "num_tokens": 1, "context": 0, "step_ms": 0}\n',
            r"line 2: .*step_ms",
        ),
        (
            '{"kind": "decode", "num_seqs": 1, "num_tokens": 1, "context": 0, "step_ms": 1}\n',
            "rows of both kinds",
        ),
        (
            '{"kind": "decode", "num_seqs": 1, "num_tokens": 1, "context": 0, "step_ms": 1, "model": "a"}\n'
            '{"kind": "decode", "num_seqs": 1, "num_tokens": 1, "context": 0, "step_ms": 1, "model": "b"}\n',
            "several models, a, b: keep those of one",
        ),
        (
            '{"kind": "decode", "num_seqs": 1, "num_tokens": 1, "context": 0, "step_ms": 1, "num_threads": 2}\n'
            '{"kind": "decode", "num_seqs": 1, "num_tokens": 1, "context": 0, "step_ms": 1, "num_threads": 1}\n',
            "several numbers of threads, 1, 2: keep those of one",
        ),
    ],
)
def test_files_that_are_no_costs_are_refused(tmp_path, text, problem):
    path = tmp_path / "costs"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_costs(path)
    with pytest.raises(ConfigError, match="cannot read the costs"):
        read_costs(tmp_path / "missing")

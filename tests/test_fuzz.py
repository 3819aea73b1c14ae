"""A share of the fuzzing that is the same every time, and what becomes of a find."""

from itertools import islice
from pathlib import Path
from random import Random

import pytest

from reliability import fuzz
from reliability.fuzz_target import Target
from reliability.fuzz_targets import TARGETS

NUM_INPUTS = {"events": 250, "messages": 250, "http": 250, "store": 100}


@pytest.mark.parametrize("name", TARGETS)
def test_spoilt_input_is_taken_or_refused_as_promised(name):
    findings = fuzz.fuzz(name, seed=1, num_inputs=NUM_INPUTS.get(name, 500))
    assert findings.finds == []
    assert findings.taken > 0
    assert findings.refused > 0


def test_each_message_is_read_by_the_engine_or_the_server():
    target = TARGETS["messages"]
    assert [target.run(message) for message in target.corpus()] == [""] * 9


def test_what_is_found_is_kept(monkeypatch, tmp_path):
    def run(data: bytes) -> str:
        assert b"7" not in data, "a seven"
        return ""

    monkeypatch.setitem(fuzz.TARGETS, "planted", Target(run, lambda: [b"1234568"], (b"7",)))
    monkeypatch.setattr(fuzz.tempfile, "gettempdir", lambda: str(tmp_path))
    findings = fuzz.fuzz("planted", seed=1, num_inputs=10_000)
    assert findings.inputs < 10_000
    (found,) = findings.finds
    assert found.startswith("AssertionError: a seven")
    (kept,) = Path(tmp_path).iterdir()
    assert b"7" in kept.read_bytes()
    assert str(kept) in found


def test_what_is_slow_is_a_find(monkeypatch):
    target = Target(lambda data: "" if len(data) < 50 else str(sum(range(10**6))), list)
    monkeypatch.setitem(fuzz.TARGETS, "planted", target)
    monkeypatch.setattr(fuzz, "SLOW_S", 1e-3)
    with pytest.raises(AssertionError, match="it takes"):
        fuzz.attempt(fuzz.TARGETS["planted"], bytes(60))
    assert fuzz.attempt(fuzz.TARGETS["planted"], b"")[0] == ""


def test_one_seed_makes_one_run():
    def inputs(seed: int) -> list[bytes]:
        known = TARGETS["trace"].corpus()
        return list(islice(fuzz.mutations(TARGETS["trace"], Random(seed), known, len(known)), 200))

    assert inputs(1) == inputs(1) != inputs(2)

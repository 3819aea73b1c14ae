"""A share of `python -m reliability.injections`, and that it would notice."""

from pathlib import Path

import pytest

from quire.common.faults import POINTS
from quire.engine.llm_engine import LLMEngine
from quire.engine.scheduling.unfinished import UnfinishedRequests
from quire.engine.step.containment import FailureIsolator
from quire.kv.slot_copies import SlotCopies
from reliability import injections
from tests.kernels.isas import needs_native

ROOT = Path(__file__).parents[2]
SHARE = 80
NOTICED_WITHIN = 60
"""injections"""

pytestmark = needs_native  # other kernels do not promise the same bits in any batch


@pytest.fixture(scope="module")
def scene():
    """What all shares begin with: an injection that leaves anything in its engine is wrong, and fails its own share."""
    return injections.Scene()


@pytest.mark.slow
@pytest.mark.parametrize("share", range(3))
def test_only_who_is_hit_ends(share, scene, monkeypatch):
    monkeypatch.setattr(injections, "Scene", lambda: scene)
    report = injections.inject_all(range(share * SHARE, (share + 1) * SHARE), seed=0, num_workloads=4)
    assert report.wrong == []
    assert report.fired.total() > SHARE * 0.8
    assert report.num_requests > 5 * SHARE
    assert 0 < report.ended.total() < SHARE


def planted_early(self, groups):
    """The first that happens to be there is to blame."""
    return groups[0] if groups else None


def planted_keeps(self, group):
    """The request has ended, and its blocks stay."""
    for seq in group.unfinished_seqs:
        seq.finish(type(seq.status).FINISHED_ABORTED)


def planted_forgets(self, step=None):
    """What was to be copied is taken to be there."""
    for step in list(self._in_flight):
        self.settle(step)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("owner", "method", "planted"),
    [
        (FailureIsolator, "failed", planted_early),
        (LLMEngine, "_abort", planted_keeps),
        (UnfinishedRequests, "revert", planted_forgets),
        (SlotCopies, "_release", lambda self, copies: None),
    ],
    ids=["early", "keeps", "forgets", "leaks"],
)
def test_a_planted_bug_is_noticed(monkeypatch, owner, method, planted):
    shown: list[str] = []
    scene = injections.Scene()
    for which in range(4):
        for setup in injections.SETUPS:
            scene.passes(which, setup)
    monkeypatch.setattr(injections, "Scene", lambda: scene)
    monkeypatch.setattr(owner, method, planted)
    for number in range(NOTICED_WITHIN):
        if injections.inject_all([number], seed=0, num_workloads=4, show=shown.append).wrong:
            return
    raise AssertionError("not noticed")


def test_a_run_is_the_same_every_time():
    passes = dict.fromkeys(injections.COMMON | injections.OWN, 20)
    first, second, other = ([injections.choose(seed, n, lambda *_: passes, 9) for n in range(50)] for seed in (1, 1, 2))
    assert first == second != other


def test_every_point_is_in_the_code_and_none_beside():
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for call in ("fault_point(", "fault_write("):
            used |= {part.split('"')[1] for part in text.split(call)[1:] if part.startswith('"')}
    assert used | {"memory.native"} == POINTS.keys() | {"memory.native"}


def test_every_point_that_a_step_passes_is_injected():
    injected = injections.COMMON | injections.OWN
    rooms = {point.split(".")[0] for point in injected}
    assert injected == {point for point in POINTS if point.split(".")[0] in rooms}
    assert injections.COMMON.isdisjoint(injections.OWN)

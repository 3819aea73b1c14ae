"""How a case is run over HTTP."""

import re

from tests.hostile.cases import Ask, Case
from tests.hostile.target import PATIENCE, RESULTS, Reply, Target


def run(target: Target, case: Case) -> None:
    """Ask all of it; each answer is one that the case allows, in time."""
    for ask in case:
        if ask.path.startswith("/"):
            check(ask, target.post(ask.path, ask.body), case.limit_s, case.name)


def check(ask: Ask, reply: Reply, limit_s: float, name: str) -> None:
    shown = f"{ask.body[:300]!r} was answered {reply.status}: {reply.body[:500]!r}"
    assert reply.status in ask.statuses, shown
    if reply.status >= 400:
        assert re.search(ask.words, reply.message), shown
        assert len(reply.body) < 4000, "the answer says too much"
    RESULTS.note("seconds until an answer", reply.seconds, name)
    assert reply.seconds < limit_s * PATIENCE, f"{reply.seconds:.1f} s: {shown}"

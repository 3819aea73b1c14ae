"""Requests that ask for too much, or for nonsense: refused with a reason, or served; over HTTP and offline."""

import pytest

from tests.hostile.attack import run
from tests.hostile.cases import GRAMMARS, PARAMS, STRUCTURES, Case

CASES = [
    pytest.param(case, id=case.name, marks=[] if case.is_quick else [pytest.mark.thorough])
    for case in (*PARAMS, *GRAMMARS, *STRUCTURES)
]


@pytest.mark.parametrize("case", CASES)
def test_beside_a_canary(guarded, case: Case):
    run(guarded, case)


@pytest.mark.thorough
@pytest.mark.parametrize("case", CASES)
def test_alone(guarded_server, case: Case):
    with guarded_server.unharmed(case.name, is_heard=False):
        run(guarded_server, case)

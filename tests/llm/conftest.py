"""One LLM over a model that recites how long its prompt was."""

from collections.abc import Iterator

import pytest

from quire import LLM
from tests.scripted_engine import RecitingExecutor, scripted_llm


@pytest.fixture(scope="module")
def shared() -> tuple[LLM, RecitingExecutor]:
    return scripted_llm()


@pytest.fixture
def llm(shared: tuple[LLM, RecitingExecutor]) -> Iterator[LLM]:
    """Whatever a test did, nothing is left in the engine."""
    yield shared[0]
    assert not shared[0].engine.has_unfinished_requests()
    assert shared[0].engine.stats().num_used_blocks == 0


@pytest.fixture
def executor(shared: tuple[LLM, RecitingExecutor]) -> Iterator[RecitingExecutor]:
    yield shared[1]
    shared[1].before_step = lambda step: None

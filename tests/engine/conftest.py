"""Engines whose model recites how long its prompt was, and a log that stays silent."""

import logging
from collections.abc import Iterator

import pytest

from quire import LLM
from tests.engine.reciting import PROMPT, generate
from tests.scripted_engine import RecitingExecutor, recital, scripted_llm


@pytest.fixture(scope="module")
def shared() -> tuple[LLM, RecitingExecutor]:
    return scripted_llm(max_num_seqs=8)


@pytest.fixture
def llm(shared: tuple[LLM, RecitingExecutor]) -> Iterator[LLM]:
    """Whatever a test did, the engine is as good as new."""
    yield shared[0]
    assert not shared[0].engine.has_unfinished_requests()
    assert shared[0].engine.stats().num_used_blocks == 0
    assert generate(shared[0], temperature=0, max_tokens=50).outputs[0].text == recital(len(PROMPT))


@pytest.fixture
def executor(shared: tuple[LLM, RecitingExecutor]) -> RecitingExecutor:
    return shared[1]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures that a test plants are not logged."""
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)

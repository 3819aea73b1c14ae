"""Applications under test."""

import pytest

from quire import LLM, EngineArgs, LLMEngine
from tests.scripted_engine import scripted_llm
from tests.server.in_process import Server, serve


@pytest.fixture
def reciting() -> Server:
    """Over a model that says how long its prompt was."""
    llm, executor = scripted_llm()
    return serve(llm.engine, executor)


@pytest.fixture(scope="session")
def tiny_engine() -> LLMEngine:
    return LLMEngine.from_args(EngineArgs(num_gpu_blocks_override=128, max_model_len=512))


@pytest.fixture
def tiny(tiny_engine: LLMEngine) -> Server:
    """Over the embedded checkpoint."""
    return serve(tiny_engine)


@pytest.fixture
def tiny_llm(tiny_engine: LLMEngine) -> LLM:
    """The same, offline: the oracle."""
    return LLM.from_engine(tiny_engine)

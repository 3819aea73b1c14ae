"""Applications under test."""

from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, EngineArgs, LLMEngine
from tests.scripted_engine import scripted_llm
from tests.server.in_process import Server, saying, serve
from tests.server.responses import Say


@pytest.fixture
def reciting() -> Server:
    """Over a model that says how long its prompt was, a token in each step."""
    llm, executor = scripted_llm(speculative_config={"method": "off"})
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


@pytest.fixture
def say() -> Iterator[Say]:
    """Makes servers whose model says one thing."""
    servers = []

    def made(reply: str = "Hello!", **kwargs: Any) -> Server:
        servers.append(saying(reply, **kwargs))
        return servers[-1]

    yield made
    for server in servers:
        if server.state.responses is not None:
            server.state.responses.store.close()


@pytest.fixture(scope="session")
def embedder_engine() -> LLMEngine:
    return LLMEngine.from_args(EngineArgs(runner="pooling", num_gpu_blocks_override=64, max_model_len=128))


@pytest.fixture
def embedder(embedder_engine: LLMEngine) -> Server:
    """Over the embedded checkpoint, which pools."""
    return serve(embedder_engine)

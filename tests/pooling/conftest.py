"""Engines over the models of models.py, which one process shares. Nothing may be left in them after a test."""

from collections.abc import Iterator

import pytest

from quire import LLM

from .models import TinyEmbedder, TinyEncoder, TinyMeanEmbedder, made_llm


@pytest.fixture(scope="session")
def _embedder() -> Iterator[LLM]:
    with made_llm(TinyEmbedder) as llm:
        yield llm


@pytest.fixture(scope="session")
def _encoder() -> Iterator[LLM]:
    with made_llm(TinyEncoder) as llm:
        yield llm


@pytest.fixture(scope="session")
def _mean_embedder() -> Iterator[LLM]:
    with made_llm(TinyMeanEmbedder) as llm:
        yield llm


def checked(llm: LLM) -> Iterator[LLM]:
    """Without a cache from other tests, and with nothing left behind."""
    assert llm.reset_prefix_cache()
    yield llm
    llm.engine.requests.check_integrity()
    assert not llm.engine.has_unfinished_requests()
    assert llm.engine.stats().num_used_blocks == 0


@pytest.fixture
def embedder(_embedder: LLM) -> Iterator[LLM]:
    """A decoder that pools the last token."""
    yield from checked(_embedder)


@pytest.fixture
def encoder(_encoder: LLM) -> Iterator[LLM]:
    """An encoder, which keeps nothing."""
    yield from checked(_encoder)


@pytest.fixture
def mean_embedder(_mean_embedder: LLM) -> Iterator[LLM]:
    """A decoder that pools all tokens."""
    yield from checked(_mean_embedder)

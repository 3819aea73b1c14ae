"""What the tests with real clients talk to."""

from collections.abc import Iterator

import pytest

from quire import EngineArgs, LLMEngine
from tests.clients.served import Served, quire_serve
from tests.server.in_process import Server, serve


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`quire serve` with the embedded checkpoint: one in each test process, so that nothing is shared between them."""
    with quire_serve(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def tiny() -> Server:
    """The application over the embedded checkpoint, without processes and sockets."""
    return serve(LLMEngine.from_args(EngineArgs(num_gpu_blocks_override=128, max_model_len=512)))

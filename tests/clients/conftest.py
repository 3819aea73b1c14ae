"""What the tests with real clients talk to."""

from collections.abc import Iterator

import pytest

from tests.clients.served import Served, quire_serve


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`quire serve` with the embedded checkpoint: one in each test process, so that nothing is shared between them."""
    with quire_serve(tmp_path_factory.mktemp("served")) as served:
        yield served

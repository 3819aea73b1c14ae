"""What the tests with real clients talk to."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from quire import EngineArgs, LLMEngine
from tests.clients.served import Served, quire_serve
from tests.server.in_process import Server, serve

if TYPE_CHECKING:  # only the tests of the page need a browser
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="package")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`quire serve` with the embedded checkpoint: one in each test process, so that nothing is shared between them."""
    with quire_serve(tmp_path_factory.mktemp("served"), pause_s=0.005) as served:
        yield served


@pytest.fixture
def tiny() -> Server:
    """The application over the embedded checkpoint, without processes and sockets."""
    return serve(LLMEngine.from_args(EngineArgs(num_gpu_blocks_override=128, max_model_len=512)))


@pytest.fixture(scope="module")
def chromium() -> Iterator["Browser"]:
    """A browser without a window. As long as it is open, its event loop runs in this thread, and no other can."""
    from playwright.sync_api import sync_playwright

    from tests.clients.chromium import CHROMIUM

    with sync_playwright() as playwright:
        path = CHROMIUM or playwright.chromium.executable_path
        if not Path(path).exists():
            assert "CI" not in os.environ, "CI must test the page: install chromium"
            pytest.skip("there is no Chromium: install Debian's package chromium, or: playwright install chromium")
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: "Browser", served: Served) -> Iterator["Page"]:
    """The page over `served`."""
    from tests.clients.chromium import opened

    with opened(chromium, served) as page:
        yield page

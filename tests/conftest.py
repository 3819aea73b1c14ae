"""What every test may rely on."""

import os
import signal

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)  # a check of a change tells of the change, not of luck
if "CI" in os.environ:
    settings.load_profile("ci")


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background and the shell has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

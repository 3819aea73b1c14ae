"""Checkpoints of the tests of models, and what one process answers."""

from typing import Any

import pytest

from quire import LLM
from tests.models.conftest import folder, llama, save_checkpoint
from tests.parallel.ends import PARAMS, PROMPTS, TINY
from tests.parallel.ranks import answers

__all__ = ["folder", "llama", "save_checkpoint"]


@pytest.fixture(scope="module")
def expected() -> Any:
    return answers(LLM(**TINY), PROMPTS, PARAMS)

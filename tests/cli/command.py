"""Helpers of the tests of commands that load a model."""

from collections.abc import Callable
from typing import Any

from ..scripted_engine import recital

Run = Callable[..., tuple[int, str, str]]


def chat_recital(loaded: dict[str, Any], content: str) -> str:
    return recital(len(loaded["llm"].chat_prompt([{"role": "user", "content": content}])["prompt_token_ids"]))

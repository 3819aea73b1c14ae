"""Helpers of the tests of /v1/responses."""

import json
from collections.abc import Callable
from typing import Any

from tests.server.in_process import Answer, Server

Say = Callable[..., Server]
URL = "/v1/responses"


def create(server: Server, **fields: Any) -> Any:
    answer = server.post(URL, {"input": "Hi", "max_output_tokens": 64, **fields})
    assert answer.status == 200, answer.body
    return answer.json


def events_of(answer: Answer) -> list[dict[str, Any]]:
    """The stream's events, whose names are those of their data."""
    events = []
    for frame in answer.frames:
        name, data = frame.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events

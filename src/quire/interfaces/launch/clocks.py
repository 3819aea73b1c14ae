"""Times in messages to and from an engine on another machine, whose time.monotonic() is another clock."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from msgspec.structs import replace

from quire.common.outputs import RequestMetrics
from quire.engine.process.messages import AddMany, AddPooling, AddRequest, StepDone

_Message = TypeVar("_Message")
_TIMES = ("arrival_time", "first_scheduled_time", "first_token_time", "finished_time")


def shifted(message: _Message, seconds: float) -> _Message:
    """Return the message with this number of seconds added to each time in it, or itself if it has none."""
    if seconds == 0.0:
        return message
    match message:
        case AddRequest(arrival_time=arrival, progress=progress):
            if progress is not None:
                progress = replace(progress, metrics=_metrics(progress.metrics, seconds))
            return replace(message, arrival_time=arrival + seconds, progress=progress)
        case AddPooling(arrival_time=arrival):
            return replace(message, arrival_time=arrival + seconds)
        case AddMany(requests=requests):
            return replace(message, requests=[shifted(request, seconds) for request in requests])
        case StepDone(deltas=deltas):
            moved = [
                delta if delta.metrics is None else replace(delta, metrics=_metrics(delta.metrics, seconds))
                for delta in deltas
            ]
            return replace(message, deltas=moved)
    return message


def _metrics(metrics: RequestMetrics, seconds: float) -> RequestMetrics:
    times: dict[str, Any] = {name: None if (at := getattr(metrics, name)) is None else at + seconds for name in _TIMES}
    return dataclasses.replace(metrics, **times)

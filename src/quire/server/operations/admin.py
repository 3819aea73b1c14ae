"""Endpoints for administrators: sleep, wake up, forget cached prefixes, restart. `?model=` names one model, not all."""

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import ApiError
from quire.server.http.state import state_of
from quire.server.models.entry import ModelEntry


class ModelStates(msgspec.Struct, kw_only=True):
    """The state of each model, by name, as in /v1/models."""

    models: dict[str, str]


class IsSleeping(msgspec.Struct, kw_only=True):
    """Whether the models sleep until an administrator wakes them up."""

    is_sleeping: bool


async def sleep(request: Request) -> ASGIApp:
    """POST /sleep: running requests finish first, and further ones are refused until /wake_up. vLLM's `level` makes no
    difference. Raises ApiError (503) if requests still run after `drain_timeout_s`."""
    state, entries = state_of(request), _entries(request)
    await state.models.hold_asleep(entries, state.args.drain_timeout_s)
    return _states(entries)


async def wake_up(request: Request) -> ASGIApp:
    """POST /wake_up: load the models that /sleep put to sleep, or the one that is named. vLLM's `tags` make no
    difference."""
    entries = _entries(request)
    await state_of(request).models.wake_up(entries, all_of_them="model" in request.query_params)
    return _states(entries)


async def is_sleeping(request: Request) -> ASGIApp:
    """GET /is_sleeping"""
    return json_response(IsSleeping(is_sleeping=all(entry.is_held_asleep for entry in _entries(request))))


async def reset_prefix_cache(request: Request) -> ASGIApp:
    """POST /reset_prefix_cache. Raises ApiError (409) while requests run; some models may have been reset then."""
    entries = _entries(request)
    for entry in entries:
        if entry.is_awake and entry.llm is not None and not await entry.llm.reset_prefix_cache():
            message = f"requests of the model {entry.name!r} are running, which use cached prefixes; try again later"
            raise ApiError(409, message, code="requests_running", headers={"retry-after": "1"})
    return _states(entries)


async def restart_engines(request: Request) -> ASGIApp:
    """POST /restart_engines: replace the engine processes, one after another. Where there are several, an engine's
    requests that still run after `drain_timeout_s` continue in the others; a single engine's wait for the new one."""
    state, entries = state_of(request), _entries(request)
    for entry in entries:
        if entry.is_awake and entry.llm is not None:
            await entry.llm.restart_engines(state.args.drain_timeout_s)
    return _states(entries)


def _entries(request: Request) -> list[ModelEntry]:
    pool, name = state_of(request).models, request.query_params.get("model")
    return list(pool.entries) if name is None else [pool.find(name)]


def _states(entries: list[ModelEntry]) -> ASGIApp:
    return json_response(ModelStates(models={entry.name: entry.status for entry in entries}))


ENDPOINTS = (
    Endpoint("/sleep", "POST", sleep, "Put models to sleep", response=ModelStates, kind="admin", statuses=(404, 503)),
    Endpoint("/wake_up", "POST", wake_up, "Wake models up", response=ModelStates, kind="admin", statuses=(404, 503)),
    Endpoint(
        "/is_sleeping", "GET", is_sleeping, "Do the models sleep?", response=IsSleeping, kind="admin", statuses=(404,)
    ),
    Endpoint(
        "/reset_prefix_cache", "POST", reset_prefix_cache, "Forget cached prefixes",
        response=ModelStates, kind="admin", statuses=(404, 409, 503),
    ),
    Endpoint(
        "/restart_engines", "POST", restart_engines, "Replace engine processes, one after another",
        response=ModelStates, kind="admin", statuses=(404, 503),
    ),
)  # fmt: skip

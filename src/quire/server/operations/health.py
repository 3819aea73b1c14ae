"""Endpoints that report the server's health, readiness, load and version."""

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.common.errors import EngineDeadError
from quire.common.version import __version__
from quire.server.api.tokens.protocol import Load, Status, Version
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.state import state_of
from quire.server.models.pool import ModelPool


async def health(request: Request) -> ASGIApp:
    """GET /health and /ping: 200 while an engine runs or can be started, else 503 and the reason."""
    models = state_of(request).models
    death = engine_death(models)
    return json_response(Status(status=str(death or _ok(models))), 200 if death is None else 503)


def _ok(models: ModelPool) -> str:
    """The status while an engine runs: `ok`, and how many run if some do not."""
    loaded = [entry.llm for entry in models.entries if entry.is_awake and entry.llm is not None]
    running = [is_running for llm in loaded for is_running in llm.group.running]
    return "ok" if all(running) else f"ok: {sum(running)} of {len(running)} engines run"


async def ready(request: Request) -> ASGIApp:
    """GET /ready: 200 while new requests are accepted, else 503 and the reason."""
    state = state_of(request)
    why_not: object = "the server is shutting down" if state.is_draining else engine_death(state.models)
    if why_not is None and all(entry.is_held_asleep for entry in state.models.entries):
        why_not = "the models sleep until the administrator wakes them up"
    return json_response(Status(status=str(why_not or "ready")), 200 if why_not is None else 503)


def engine_death(models: ModelPool) -> EngineDeadError | None:
    """Why no engine of the models that are awake runs; None if one does, or if none is awake."""
    deaths = [entry.llm.death for entry in models.entries if entry.is_awake and entry.llm is not None]
    return None if None in deaths else next(iter(deaths), None)


async def version(request: Request) -> ASGIApp:
    """GET /version"""
    return json_response(Version(version=__version__))


async def load(request: Request) -> ASGIApp:
    """GET /load"""
    return json_response(Load(server_load=state_of(request).num_in_flight))


ENDPOINTS = (
    Endpoint("/health", "GET", health, "Is the engine up?", response=Status, kind="health"),
    Endpoint("/ping", "GET", health, "Is the engine up?", response=Status, kind="health"),
    Endpoint("/ping", "POST", health, "Is the engine up?", response=Status, kind="health"),
    Endpoint("/ready", "GET", ready, "Is the server ready?", response=Status, kind="health"),
    Endpoint("/version", "GET", version, "Show the version", response=Version),
    Endpoint("/load", "GET", load, "Count running requests", response=Load),
)

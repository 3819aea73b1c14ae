"""A Ray Serve application: `serve run quire.ray_serve:build_app model=quire-tiny`.

Each replica is the server of `quire serve`, with its models and engines, behind Ray Serve's HTTP proxy.
"""

import contextlib
import dataclasses
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import yaml
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.common.errors import ConfigError
from quire.common.log import set_up_logging
from quire.config.args import EngineArgs
from quire.interfaces.launch.ray_cluster import MISSING
from quire.server.config import ServerArgs, merge_args
from quire.server.http.auth import ApiKeys
from quire.server.models.pool import ModelPool
from quire.server.models.spec import ModelSpec
from quire.server.operations.health import engine_death
from quire.server.serve import application, finish

MAX_REPLICAS = 4
_END_S = 10.0
"""How much longer than the drain timeout a replica may take to end: its engines end after the last request."""


def build_app(args: dict[str, Any]) -> Any:
    """Return the application for Ray Serve, of arguments of `quire serve` by their names.

    Values may be texts, as on the command line. `autoscaling_config` has Ray Serve's fields over these: 1 to 4
    replicas, one more where more requests wait or run than a replica runs at once (`max_num_seqs`). Raises ConfigError.
    """
    try:
        from ray import serve
    except ImportError as error:
        raise ConfigError(f"{MISSING} ({error})") from error
    given = dict(args)
    scaling = given.pop("autoscaling_config", None) or {}
    scaling = yaml.safe_load(scaling) if isinstance(scaling, str) else scaling
    if not isinstance(scaling, dict):
        raise ConfigError(f"autoscaling_config={scaling!r}: must contain names and values, such as max_replicas: 2")
    server, models = read_args(given)
    num_seqs = sum(spec.engine.max_num_seqs for spec in models)
    deployment = serve.deployment(
        name="quire",
        autoscaling_config={"max_replicas": MAX_REPLICAS, "target_ongoing_requests": num_seqs, **scaling},
        max_ongoing_requests=num_seqs + server.max_waiting,  # a replica has its own queue, and refuses what is more
        graceful_shutdown_timeout_s=server.drain_timeout_s + _END_S,
        ray_actor_options={"num_cpus": sum(_num_cpus(spec.engine) for spec in models)},
    )
    return deployment(serve.ingress()(Replica)).bind(given)


class Replica:
    """One replica: what `quire serve` runs, without its HTTP server. Ray Serve makes it and calls its methods."""

    async def __init__(self, given: Mapping[str, Any]) -> None:  # type: ignore[misc]  # awaited by Ray Serve
        """Load the first model, or all with `preload_models`. Raises ConfigError, CheckpointError or
        OutOfMemoryError."""
        args, specs = read_args(given)
        set_up_logging(args.log_format)
        keys, admin_keys = ApiKeys.load_pair(args)
        self._models = ModelPool(specs, args)
        try:
            await self._models.load_first()
            self._ending = contextlib.ExitStack()
            self._app, self._state, self._gate = self._ending.enter_context(
                application(self._models, args, keys, admin_keys)
            )
        except BaseException:
            await self._models.shutdown()
            raise

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return _Lived(self._app, self.end)

    async def check_health(self) -> None:
        """Raise EngineDeadError while no engine runs. Ray Serve replaces a replica in which this persists."""
        if (death := engine_death(self._models)) is not None:
            raise death

    async def end(self) -> None:
        """Finish the requests that still run, and end the engines."""
        self._state.is_draining = True
        await finish(self._state, self._gate)
        await self._models.shutdown()
        self._ending.close()


class _Lived:
    """An application, and what ends it, which Ray Serve calls by ASGI's lifespan when it sends no more requests."""

    def __init__(self, app: ASGIApp, end: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request, or wait for the end."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._end()
        await send({"type": "lifespan.shutdown.complete"})


def read_args(given: Mapping[str, Any]) -> tuple[ServerArgs, Sequence[ModelSpec]]:
    """Return the arguments of the server, and its models. Raises ConfigError, as for a configuration file."""
    kinds = {field.name: str(field.type) for cls in (ServerArgs, EngineArgs) for field in dataclasses.fields(cls)}
    flags = {name.replace("-", "_"): value for name, value in given.items()}
    for name, value in flags.items():
        if isinstance(value, str) and kinds.get(name, "str") not in ("str", "str | None"):
            flags[name] = _read(name, value)
            if "tuple" in kinds[name] and not isinstance(flags[name], list):
                flags[name] = [value]
    return merge_args(flags.pop("config", None), flags)


def _read(name: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}={value!r} cannot be read as a value in YAML: {error}") from error


def _num_cpus(args: EngineArgs) -> int:
    """CPUs that Ray reserves for a replica's engines; actors of their own have theirs."""
    if args.distributed_executor_backend == "ray":
        return 0
    if args.num_threads is None:
        return len(os.sched_getaffinity(0))
    return args.num_threads * args.tensor_parallel_size * args.pipeline_parallel_size * args.data_parallel_size

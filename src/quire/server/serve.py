"""`quire serve`: listen, load the model, serve until a signal, drain, stop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import uvicorn
import uvloop
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from quire.common.errors import ConfigError
from quire.common.log import logger, set_up_logging
from quire.common.memory import give_back_memory
from quire.common.version import __version__
from quire.config.checkpoint.location import running_downloads
from quire.server.api.pooling.run import MAX_TEXTS
from quire.server.api.responses import endpoint as responses
from quire.server.app import ROUTES, make_app
from quire.server.config import ServerArgs, describe_args
from quire.server.http.auth import (
    Administration,
    AllowedHosts,
    ApiKeys,
    Authentication,
    callers_are_one_tenant,
    checks_hosts,
)
from quire.server.http.endpoint import Endpoint
from quire.server.http.protocol import limited_protocol
from quire.server.http.state import RequestContext, ServerState
from quire.server.models.entry import ModelEntry
from quire.server.models.pool import ModelPool
from quire.server.models.spec import ModelSpec
from quire.server.operations.admission import Admission
from quire.server.operations.lifecycle import AdmissionControl, DrainGate, LoadingApp
from quire.server.operations.metrics import METRICS_ENDPOINT, Metrics
from quire.server.operations.model_metrics import ModelMetrics
from quire.server.operations.request_log import EngineListener, NamedRoute, Observer, log_request
from quire.server.operations.tracing import Tracer

_NUM_FILES = 65_536
_BACKLOG = 2048
_LAST_CONNECTIONS_S = 2


def serve(args: ServerArgs, models: Sequence[ModelSpec]) -> int:
    """Serve these models until SIGTERM or SIGINT. Returns the exit status: 0 after draining, 128 + the signal's number
    if a second signal did not wait for that. Raises ConfigError, CheckpointError, OutOfMemoryError, EngineDeadError."""
    began = time.monotonic()
    set_up_logging(args.log_format)
    keys, admin_keys = ApiKeys.load_pair(args)
    logger.info("quire %s, configuration:\n%s", __version__, describe_args(args, *models))
    _allow_many_connections()
    service = _Service(args, models, keys, admin_keys)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with _listening(args) as sock:
            status = runner.run(service.run(sock, began))
        if running_downloads:
            logger.info("a download was interrupted; the next start continues it")
            os._exit(status)
        return status


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would close its sockets before the last requests are answered."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Service:
    """One run of a server."""

    def __init__(self, args: ServerArgs, models: Sequence[ModelSpec], keys: ApiKeys, admin_keys: ApiKeys) -> None:
        self._args = args
        self._models = ModelPool(models, args)
        self._keys = keys
        self._admin_keys = admin_keys
        self._loading_app = LoadingApp()
        self._http = _Server(_uvicorn_config(self._loading_app, args))
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._exit_status = 0

    async def run(self, sock: socket.socket, began: float) -> int:
        """Load the model, serve until a signal, and stop. Returns the exit status."""
        self._catch_signals()
        http = asyncio.create_task(self._http.serve(sockets=[sock]))
        url = _url(self._args, sock)
        try:
            with application(self._models, self._args, self._keys, self._admin_keys) as (app, state, gate):
                logger.info("loading the model; meanwhile %s answers 503", url)
                if await self._load():
                    self._loading_app.app = app
                    await self._serve(state, gate, url, began)
        finally:
            self._http.should_exit = True
            await http
            await self._models.shutdown()
        return self._exit_status

    def _catch_signals(self) -> None:
        """Install signal handlers: the first signal drains the server, the second aborts running requests."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int) -> None:
            if not self._stop.is_set():
                logger.info("stopping")
                self._stop.set()
            elif self._draining is not None and self._draining.cancel():
                self._exit_status = 128 + number
                self._http.force_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)

    async def _load(self) -> bool:
        """Load the first model, or all; False if a signal arrived before they were loaded."""

        loading = asyncio.create_task(self._models.load_first())
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            return loading.done()
        finally:
            for task in (loading, stopped):
                task.cancel()
            await asyncio.gather(loading, stopped, return_exceptions=True)

    async def _serve(self, state: ServerState, gate: DrainGate, url: str, began: float) -> None:
        args = self._args
        names = [entry.name for entry in self._models.entries]
        gc.collect()
        gc.freeze()  # as in the engine process
        seconds = time.monotonic() - began
        logger.info("quire %s serves %s at %s (ready in %.1f s)", __version__, ",".join(names), url, seconds)
        await self._stop.wait()
        state.is_draining = True
        if gate.num_working:
            wait = "requests that still run: %d; they have %g s to finish, and another signal ends them now"
            logger.info(wait, gate.num_working, args.drain_timeout_s)
        self._draining = asyncio.create_task(finish(state, gate))
        await asyncio.wait({self._draining})


@contextlib.contextmanager
def application(
    models: ModelPool, args: ServerArgs, keys: ApiKeys, admin_keys: ApiKeys
) -> Iterator[tuple[ASGIApp, ServerState, DrainGate]]:
    """The application of these models, its state, and the gate by which `finish` ends it."""
    state = ServerState(models=models, args=args)
    responses.stored_responses(state)  # a store that cannot be opened stops the server before its model is loaded
    gate = DrainGate(
        request_timeout_s=args.request_timeout_s, drain_timeout_s=args.drain_timeout_s, on_idle=give_back_memory
    )
    with contextlib.ExitStack() as stack:
        tracers = [] if args.otlp_endpoint is None else [Tracer(args.otlp_endpoint, models.entries[0].name)]
        for tracer in tracers:
            stack.callback(tracer.shutdown)
        try:
            yield build_app(state, gate, keys, tracers, admin_keys=admin_keys), state, gate
        finally:
            if not gate.is_closed and state.responses is not None:  # the model was not loaded
                state.responses.store.close()


async def finish(state: ServerState, gate: DrainGate) -> None:
    """Drain requests whose clients wait, then background responses in the remaining time. Cancelling this call once
    ends the waiting; cleaning up continues."""
    ends_s, task = time.monotonic() + state.args.drain_timeout_s, asyncio.current_task()
    await gate.drain()
    if state.responses is not None:
        hurries = task is not None and task.cancelling()
        await state.responses.shutdown(0.0 if hurries else max(0.0, ends_s - time.monotonic()))
    gate.close()


def num_waiting(models: Sequence[ModelEntry]) -> int:
    """The prompts that wait for these models. Of texts to pool, those beyond what one request may have: it alone must
    not fill the queue for everybody."""
    counts = {"generate": 0, "pooling": 0}
    for llm in [entry.llm for entry in models if entry.llm is not None]:
        counts["generate" if llm.pooler is None else "pooling"] += llm.stats().num_waiting
    return counts["generate"] + max(0, counts["pooling"] - MAX_TEXTS)


def build_app(
    state: ServerState,
    gate: DrainGate,
    keys: ApiKeys,
    sinks: Sequence[Callable[[RequestContext], None]] = (),
    *,
    admin_keys: ApiKeys | None = None,
) -> ASGIApp:
    """The application with its middleware for operation: logs, metrics, keys, limits and deadlines."""
    args, models = state.args, state.models
    max_num_seqs = sum(entry.spec.engine.max_num_seqs for entry in models.entries)
    admission = Admission(
        args, max_num_seqs=max_num_seqs, num_waiting=lambda: num_waiting(models.entries), clock=time.monotonic
    )
    metrics = state.metrics = Metrics(refused=lambda: admission.num_refused)

    def observe(entry: ModelEntry) -> None:
        of_model = ModelMetrics(entry.name, lambda: entry.llm, is_loaded=lambda: entry.is_awake)
        metrics.add(of_model, *entry.spec.names)
        for listener in (of_model.engine, EngineListener()):
            entry.add_listener(listener)

    models.observe(observe)
    state.shows_tokens = callers_are_one_tenant(args, keys)
    is_guarded = {"api": True, "page": False, "metrics": args.guard_metrics, "health": args.guard_health}

    def wrap(app: ASGIApp, endpoint: Endpoint) -> ASGIApp:
        if endpoint.generates:
            app = AdmissionControl(app, admission)
        if endpoint.kind == "admin":
            app = Administration(app, admin_keys or ApiKeys(()))
        elif keys and is_guarded[endpoint.kind]:
            app = Authentication(app, keys)
        if endpoint.kind in ("api", "admin", "page"):
            app = gate.around(app, has_deadline=endpoint.kind != "admin")
        return NamedRoute(app, endpoint.path)

    around = [Middleware(AllowedHosts, args.allowed_hosts)] if checks_hosts(args, bool(keys)) else []
    routes = [row for row in (*ROUTES, METRICS_ENDPOINT) if args.page or row.kind != "page"]
    app: ASGIApp = make_app(state, routes=routes, around=around, wrap=wrap)
    if args.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=args.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            allow_credentials=args.allow_credentials,
            expose_headers=["x-request-id", "request-id", "x-quire-warning", "retry-after"],
        )
    logs = [log_request] if args.log_requests else []
    return Observer(app, [metrics.on_http_response, *logs, *sinks], keep_bodies=args.log_prompts)


def _uvicorn_config(app: ASGIApp, args: ServerArgs) -> uvicorn.Config:
    """Raises ConfigError if certificate or key cannot be used."""
    _check_certificates(args)
    config = uvicorn.Config(
        app,
        http=limited_protocol(args.max_header, args.header_timeout_s),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=bool(args.trusted_proxies),
        forwarded_allow_ips=list(args.trusted_proxies),
        timeout_keep_alive=max(1, round(args.idle_timeout_s)),
        timeout_graceful_shutdown=_LAST_CONNECTIONS_S,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
        ssl_ca_certs=args.ssl_ca_certs,
        ssl_cert_reqs=ssl.CERT_REQUIRED if args.ssl_ca_certs else ssl.CERT_NONE,
    )
    config.load()
    return config


def _check_certificates(args: ServerArgs) -> None:
    """Raises ConfigError with the file that cannot be used. A key with a passphrase is one: without this check, OpenSSL
    would wait for the passphrase on the terminal."""
    if args.ssl_certfile is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password="")
    except OSError as error:
        key = "its private key" if args.ssl_keyfile is None else f"ssl_keyfile={args.ssl_keyfile!r}"
        raise ConfigError(
            f"ssl_certfile={args.ssl_certfile!r} or {key} cannot be used: {error}; the key must belong to the "
            "certificate and have no passphrase"
        ) from error
    try:
        if args.ssl_ca_certs is not None:
            context.load_verify_locations(args.ssl_ca_certs)
    except OSError as error:
        raise ConfigError(f"ssl_ca_certs={args.ssl_ca_certs!r} cannot be used: {error}") from error


@contextlib.contextmanager
def _listening(args: ServerArgs) -> Iterator[socket.socket]:
    """A bound socket, closed in the end. Raises ConfigError if it is unavailable."""
    sock = _bind_path(Path(args.uds)) if args.uds is not None else _bind_port(args.host, args.port)
    with sock:
        try:
            yield sock
        finally:
            if args.uds is not None:
                Path(args.uds).unlink(missing_ok=True)


def _bind_port(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host={host!r} is not an address of this machine: {error}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        what = "in use by another program" if error.errno == errno.EADDRINUSE else f"unavailable: {error.strerror}"
        raise ConfigError(
            f"port {port} of {host} is {what}; choose another one with --port, or 0 for any free port"
        ) from error
    return sock


def _bind_path(path: Path) -> socket.socket:
    """Bind a Unix socket, after removing one that a killed server left behind."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(path)) == 0:
                    raise ConfigError(f"uds={str(path)!r} is in use by another server; choose another path")
            path.unlink()
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"uds={str(path)!r} cannot be created: {error}") from error
    except ConfigError:
        sock.close()
        raise
    return sock


def _url(args: ServerArgs, sock: socket.socket) -> str:
    if args.uds is not None:
        return f"unix:{args.uds}"
    host = f"[{args.host}]" if ":" in args.host else args.host
    return f"http{'s' if args.ssl_certfile else ''}://{host}:{sock.getsockname()[1]}"


def _allow_many_connections() -> None:
    """Raise the limit on open files, since each connection is one and the default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))

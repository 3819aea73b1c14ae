"""`quire serve`: listen, load the model, serve until a signal, drain, stop."""

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence

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
from quire.server.http.state import RequestContext, ServerState
from quire.server.listening import listening, server_url, uvicorn_config
from quire.server.models.entry import ModelEntry
from quire.server.models.pool import ModelPool
from quire.server.models.spec import ModelSpec
from quire.server.operations.admission import Admission
from quire.server.operations.lifecycle import AdmissionControl, DrainGate, LoadingApp
from quire.server.operations.metrics import METRICS_ENDPOINT, Metrics
from quire.server.operations.model_metrics import ModelMetrics
from quire.server.operations.request_log import EngineListener, Observer, log_request
from quire.server.operations.tracing import Tracer

_NUM_FILES = 65_536


def serve(args: ServerArgs, models: Sequence[ModelSpec]) -> int:
    """Serve these models until SIGTERM or SIGINT. Returns the exit status: 0 after draining, 128 + the signal's number
    if a second signal did not wait for that. SIGHUP, unless it is ignored, reads keys and certificates again. Raises
    ConfigError, CheckpointError, OutOfMemoryError, EngineDeadError."""
    began = time.monotonic()
    set_up_logging(args.log_format)
    keys, admin_keys = ApiKeys.load_pair(args)
    logger.info("quire %s, configuration:\n%s", __version__, describe_args(args, *models))
    _allow_many_connections()
    service = _Service(args, models, keys, admin_keys)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        with listening(args) as sock:
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
        self._http = _Server(uvicorn_config(self._loading_app, args))
        self._stop = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._exit_status = 0

    async def run(self, sock: socket.socket, began: float) -> int:
        """Load the model, serve until a signal, and stop. Returns the exit status."""
        self._catch_signals()
        http = asyncio.create_task(self._http.serve(sockets=[sock]))
        url = server_url(self._args, sock)
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
        """Install signal handlers: the first signal drains the server, the second aborts running requests. SIGHUP means
        the same if it comes because the terminal was closed; otherwise it reads keys and certificates again."""
        loop, has_terminal = asyncio.get_running_loop(), _has_terminal()

        def on_signal(number: int) -> None:
            if not self._stop.is_set():
                logger.info("stopping")
                self._stop.set()
            elif self._draining is not None and self._draining.cancel():
                self._exit_status = 128 + number
                self._http.force_exit = True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(
                signal.SIGHUP,
                lambda: on_signal(signal.SIGHUP) if has_terminal and not _has_terminal() else self._reload(),
            )

    def _reload(self) -> None:
        """Read keys and certificates again, for requests and connections from now on. If any of them cannot be used,
        all stay as they were."""
        try:
            tls = uvicorn_config(self._loading_app, self._args).ssl
            self._keys.reload_pair(self._admin_keys, self._args)
        except (ConfigError, OSError) as error:  # OSError: of certificates that are being replaced at this moment
            logger.error("SIGHUP: keys and certificates stay as they were: %s", error)
            return
        if self._http.config.ssl is not None:
            self._http.config.ssl.sni_callback = lambda connection, *_: setattr(connection, "context", tls)
        logger.info("SIGHUP: API keys, admin keys and certificates were read again")

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
    state.shows_tokens = lambda: callers_are_one_tenant(args, keys)
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
        return app

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


def _allow_many_connections() -> None:
    """Raise the limit on open files, since each connection is one and the default is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _NUM_FILES if hard == resource.RLIM_INFINITY else min(_NUM_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _has_terminal() -> bool:
    """Whether a terminal controls this process, and is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY))
    except OSError:
        return False
    return True

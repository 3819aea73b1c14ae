"""The application: one table of endpoints, from which requests are routed and /openapi.json is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.server import chat, completions, health, models, openapi, tokens
from quire.server.endpoint import Endpoint
from quire.server.errors import api_error, status_error
from quire.server.state import ServerState, add_context, context_of

"""/openapi.json: the table of endpoints in OpenAPI 3.2, with every status that an endpoint can return."""

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.common.version import __version__
from quire.server.http.endpoint import Endpoint
from quire.server.http.errors import ANTHROPIC_PATH, COHERE_PATHS, OLLAMA_PATH, ErrorResponse

_ALWAYS = (400, 401, 403, 500)
_WITH_BODY = (404, 408, 413, 415)
_GENERATING = (429, 503, 504)
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_ANTHROPIC_ERROR = {
    "type": "object",
    "required": ["type", "error"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}
_OLLAMA_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
_COHERE_ERROR = {"type": "object", "required": ["id", "message"], "properties": {
    "id": {"type": ["string", "null"]}, "message": {"type": "string"},
}}  # fmt: skip


def endpoint(rows: Sequence[Endpoint]) -> Endpoint:
    """The endpoint that describes `rows` and itself."""

    @lru_cache(maxsize=1)
    def described() -> bytes:
        return msgspec.json.encode(describe((*rows, own)))

    async def openapi(request: Request) -> ASGIApp:
        return Response(described(), media_type="application/json")

    own = Endpoint("/openapi.json", "GET", openapi, "Describe the endpoints", response=dict[str, Any])
    return own


def describe(rows: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI document of these endpoints."""
    rows = list(rows)
    bodies = [kind for row in rows for kind in (row.request, row.response, row.chunk) if kind is not None]
    types = list(dict.fromkeys([*bodies, ErrorResponse]))
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schema_of = dict(zip(types, schemas, strict=True))
    paths: dict[str, Any] = {}
    for row in rows:
        operation = _operation(row, schema_of)
        paths.setdefault(_PARAMETER.sub(r"{\1}", row.path), {})[row.method.lower()] = operation
    return {
        "openapi": "3.2.0",
        "info": {"title": "Quire", "version": __version__, "description": "OpenAI-compatible API of a Quire server"},
        "paths": paths,
        "components": {
            "schemas": components
            | {"AnthropicError": _ANTHROPIC_ERROR, "OllamaError": _OLLAMA_ERROR, "CohereError": _COHERE_ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(row: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": row.summary,
        "operationId": re.sub(r"\W+", "_", f"{row.method.lower()}{row.path}").strip("_"),
        "responses": _responses(row, schema_of),
    }
    parameters = _PARAMETER.findall(row.path)
    if parameters:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in parameters
        ]
    if row.request is not None:
        content = {"application/json": {"schema": schema_of[row.request]}}
        operation["requestBody"] = {"required": True, "content": content}
    if row.kind in ("api", "admin"):
        operation["security"] = [{"key": []}, {}]
    return operation


def _responses(row: Endpoint, schema_of: dict[Any, Any]) -> dict[str, Any]:
    content: dict[str, Any] = {row.media_type: {} if row.response is None else {"schema": schema_of[row.response]}}
    if row.binary is not None:
        content[row.binary] = {}
    if row.chunk is not None:
        schema = schema_of[row.chunk]
        is_ollama = row.path.startswith(OLLAMA_PATH)
        name = "application/x-ndjson" if is_ollama else "text/event-stream"
        content[name] = {"itemSchema": schema if is_ollama else _event(schema)}
    responses: dict[str, Any] = {"200": {"description": row.summary, "content": content}}
    beginnings = {ANTHROPIC_PATH: "Anthropic", OLLAMA_PATH: "Ollama", **dict.fromkeys(COHERE_PATHS, "Cohere")}
    name = next(
        (f"{name}Error" for path, name in beginnings.items() if f"{row.path}/".startswith(path)), "ErrorResponse"
    )
    error = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    for status in sorted(_statuses(row)):
        described = content if row.kind == "health" and status == 503 else error
        responses[str(status)] = {"description": HTTPStatus(status).phrase, "content": described}
    return responses


def _event(schema: Any) -> dict[str, Any]:
    """One server-sent event."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"type": "object", "required": ["data"], "properties": {"event": {"type": "string"}, "data": data}}


def _statuses(row: Endpoint) -> set[int]:
    """All statuses except 200 that the endpoint or its middleware may return; 499 is never received by a client."""
    statuses = {*_ALWAYS, *row.statuses}
    if row.request is not None:
        statuses |= set(_WITH_BODY)
    if "{" in row.path:
        statuses.add(404)
    if row.generates:
        statuses |= set(_GENERATING)
    if row.kind == "health":
        statuses.add(503)
    return statuses

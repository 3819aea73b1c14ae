"""Endpoints for the web page's files, which are part of the package and read once."""

from __future__ import annotations

from hashlib import blake2b
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.http.endpoint import Endpoint, Handler

CONTENT_SECURITY_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; object-src 'none'"
)
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _handler(content: bytes, media_type: str) -> Handler:
    """A handler that answers with this content, or with 304 if the client has it already."""
    headers = {
        "etag": f'"{blake2b(content, digest_size=12).hexdigest()}"',
        "cache-control": "no-cache",
        "content-security-policy": CONTENT_SECURITY_POLICY,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
    }

    async def answer(request: Request) -> ASGIApp:
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if headers["etag"] in known or "*" in known:
            return Response(None, 304, headers)
        return Response(content, 200, headers, media_type)

    return answer


def _endpoints() -> tuple[Endpoint, ...]:
    """A row for each file: `/` for index.html, `/page/NAME` for the others."""
    rows = []
    for file in sorted(files("quire.server").joinpath("page", "files").iterdir(), key=lambda file: file.name):
        media_type = _MEDIA_TYPES.get(file.name[file.name.rfind(".") :])
        if media_type is not None:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            handler, summary = _handler(file.read_bytes(), media_type), f"Web page: {file.name}"
            rows.append(Endpoint(path, "GET", handler, summary, media_type=media_type, kind="page"))
    return tuple(rows)


ENDPOINTS = _endpoints()

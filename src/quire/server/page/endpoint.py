"""Endpoints for the web page's files, which are part of the package and read once."""

from collections.abc import Iterator
from hashlib import blake2b
from importlib.resources import files
from importlib.resources.abc import Traversable

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


def _files(folder: Traversable, path: str = "") -> Iterator[tuple[str, bytes]]:
    """The path below `folder` and the content of each file, in a fixed order."""
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _files(entry, f"{path}{entry.name}/")
        else:
            yield path + entry.name, entry.read_bytes()


def _endpoints(folder: str, root: str, prefix: str) -> tuple[Endpoint, ...]:
    """A row for each file of a folder: `root` for index.html, `prefix` and the path for the others.

    Nothing is looked up when a request arrives, and files of other types, such as licences, are not served.
    """
    rows = []
    for name, content in _files(files("quire.server").joinpath("page", folder)):
        media_type = _MEDIA_TYPES.get(name[name.rfind(".") :])
        if media_type is not None:
            path = root if name == "index.html" else prefix + name
            handler, summary = _handler(content, media_type), f"Web page: {name}"
            rows.append(Endpoint(path, "GET", handler, summary, media_type=media_type, kind="page"))
    return tuple(rows)


ENDPOINTS = (*_endpoints("files", "/", "/page/"), *_endpoints("docs", "/docs", "/docs/"))

"""A hub of models behind a real socket, with the requests that huggingface_hub makes for a download."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMMIT = "0123456789abcdef0123456789abcdef01234567"
CHUNK = 1 << 20
WEIGHTS = "model.safetensors"


@dataclass
class Hub:
    """One repository, `org/tiny`, with the files of a folder, and `org/gated`, which nobody here may read."""

    folder: Path
    cut_weights_after: int | None = None
    """bytes after which the connection breaks, as a network does"""
    pause_s: float = 0.0
    """after each megabyte"""
    downloads: list[str] = field(default_factory=list)
    """files in the order in which they were asked for"""

    @property
    def app(self) -> Starlette:
        """The application that answers."""
        return Starlette(
            routes=[
                Route("/api/models/{org}/{name}/revision/{revision}", self.info),
                Route("/api/models/{org}/{name}/tree/{revision}", self.tree),
                Route("/{org}/{name}/resolve/{revision}/{file}", self.resolve, methods=["GET", "HEAD"]),
            ]
        )

    async def info(self, request: Request) -> Response:
        """The commit that a branch is at."""
        if refusal := self._refusal(request):
            return refusal
        return JSONResponse({"id": "org/tiny", "sha": COMMIT, "siblings": []})

    async def tree(self, request: Request) -> Response:
        """The files, their sizes and hashes."""
        return JSONResponse([self._entry(path) for path in sorted(self.folder.iterdir())])

    async def resolve(self, request: Request) -> Response:
        """A file's headers, or its bytes, a megabyte at a time; from where an earlier download broke off, if asked."""
        path = self.folder / request.path_params["file"]
        entry, content = self._entry(path), path.read_bytes()
        headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{entry["oid"]}"', "Accept-Ranges": "bytes"}
        first = int(request.headers.get("range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        headers["Content-Length"] = str(len(content) - first)
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        if request.method == "HEAD":
            return Response(headers=headers)
        self.downloads.append(path.name)
        end = self.cut_weights_after if path.name == WEIGHTS else None
        return StreamingResponse(self._chunks(content, first, end), 206 if first else 200, headers)

    async def _chunks(self, content: bytes, first: int, end: int | None) -> AsyncIterator[bytes]:
        for start in range(first, len(content), CHUNK):
            if end is not None and start >= end:
                raise ConnectionError("the network breaks here")
            yield content[start : start + CHUNK]
            await asyncio.sleep(self.pause_s)

    def _entry(self, path: Path) -> dict[str, object]:
        content = path.read_bytes()
        return {"type": "file", "path": path.name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}

    def _refusal(self, request: Request) -> Response | None:
        name = request.path_params["name"]
        if name == "tiny":
            return None
        code, status = ("GatedRepo", 403) if name == "gated" else ("RepoNotFound", 404)
        headers = {"X-Error-Code": code, "X-Error-Message": f"org/{name}: {code}"}
        return JSONResponse({"error": code}, status, headers)

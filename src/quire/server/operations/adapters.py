"""Endpoints that load and unload LoRA adapters while the server runs, with vLLM's paths and fields."""

from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.common.errors import CheckpointError
from quire.common.lora import MAX_PATH_LEN, LoRARequest
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import ApiError, invalid
from quire.server.http.state import context_of, state_of
from quire.server.models.use import use_model


class LoadAdapter(msgspec.Struct, kw_only=True):
    """The body of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    """A folder below the server's `lora_dir`, absolute or relative to it."""
    load_inplace: bool = False
    """Replace the content of an adapter that is loaded under this name; running requests keep the old one."""


class UnloadAdapter(msgspec.Struct, kw_only=True):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str
    lora_int_id: int | None = None
    """Ignored, as in vLLM: the name identifies the adapter."""


class AdapterStatus(msgspec.Struct, kw_only=True):
    """What became of an adapter."""

    lora_name: str
    status: str
    """`loaded` or `unloaded`."""


async def load_adapter(request: Request) -> ASGIApp:
    """POST /v1/load_lora_adapter, of the model that `?model=` names or of the first. The weights are loaded when a
    request needs them. Raises ApiError: 400 for a wrong adapter or a name that is taken, 403 for a folder elsewhere."""
    body, state = await read_struct(request, LoadAdapter), state_of(request)
    context_of(request).field_names["name"] = "lora_name"
    folder = _below(state.args.lora_dir, body.lora_path)
    name = request.query_params.get("model")
    model = await use_model(request, name)
    state.models.check_new_name(body.lora_name, state.models.find(name))
    known = model.llm.adapters.get(body.lora_name)
    new_id = model.llm.adapters.new_id() if known is None else known.lora_int_id
    try:
        await model.llm.add_lora(LoRARequest(body.lora_name, new_id, str(folder), load_inplace=body.load_inplace))
    except CheckpointError as error:
        raise invalid(str(error).replace(str(folder), body.lora_path), "lora_path") from error
    return json_response(AdapterStatus(lora_name=body.lora_name, status="loaded"))


async def unload_adapter(request: Request) -> ASGIApp:
    """POST /v1/unload_lora_adapter: running requests finish, later ones get 404. Raises ApiError (404)."""
    body = await read_struct(request, UnloadAdapter)
    model = await use_model(request, body.lora_name)
    if model.adapter is None:
        raise ApiError(404, f"{body.lora_name[:200]!r} is a model, not an adapter", code="adapter_not_found")
    await model.llm.remove_lora(model.adapter.name)
    return json_response(AdapterStatus(lora_name=body.lora_name, status="unloaded"))


def _below(lora_dir: str | None, path: str) -> Path:
    """The folder that a client names, with links resolved. Raises ApiError (403) if it is not below `lora_dir`."""
    if lora_dir is None:
        message = "requests cannot load adapters: start the server with --lora-dir, the folder that contains them"
        raise ApiError(403, message, code="lora_dir_missing")
    if len(path) > MAX_PATH_LEN:
        raise invalid(f"lora_path has {len(path):,} characters; at most {MAX_PATH_LEN:,} are allowed", "lora_path")
    try:
        base = Path(lora_dir).expanduser().resolve()
        folder = (base / path).resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise invalid(f"lora_path={path[:200]!r} is not a path: {error}", "lora_path") from error
    if base not in folder.parents:
        message = f"lora_path={path[:200]!r} is not below the server's lora_dir, after links are resolved"
        raise ApiError(403, message, param="lora_path", code="path_forbidden")
    return folder


ENDPOINTS = (
    Endpoint(
        "/v1/load_lora_adapter", "POST", load_adapter, "Load a LoRA adapter",
        request=LoadAdapter, response=AdapterStatus, kind="admin", statuses=(404, 503),
    ),
    Endpoint(
        "/v1/unload_lora_adapter", "POST", unload_adapter, "Unload a LoRA adapter",
        request=UnloadAdapter, response=AdapterStatus, kind="admin", statuses=(404, 503),
    ),
)  # fmt: skip

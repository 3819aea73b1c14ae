"""Error responses: an HTTP status and a JSON body in the format that the client's SDK expects."""

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Scope

from quire.common.errors import (
    EngineDeadError,
    InvalidPromptError,
    PromptTooLongError,
    QuireError,
    RequestError,
    RequestFailedError,
    TokenizerError,
)
from quire.common.log import logger
from quire.common.params import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams

TOO_LONG = "context_length_exceeded"
"""The code for a prompt that is too long."""
ANTHROPIC_PATH, OLLAMA_PATH, COHERE_PATHS = "/v1/messages", "/api/", ("/v1/embed/", "/v2/")
"""Beginnings of paths, with a slash at their end, whose errors have another form than OpenAI's."""
MAX_MESSAGE_LEN = 2000
_OPENAI_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
TEXT_FIELDS = ("input", "texts", "query", "queries", "documents", "items", "text_1", "text_2", "data_1", "data_2")
"""Fields with texts that are pooled."""
_ANTHROPIC_TYPES = _OPENAI_TYPES | {413: "request_too_large", 503: "overloaded_error"}
_PARAM_NAMES = {
    name: name for kind in (SamplingParams, BeamSearchParams, PoolingParams) for name in kind.__struct_fields__
} | dict.fromkeys(StructuredOutputsParams.__struct_fields__, "structured_outputs")
_OTHER_NAMES = ("structured_outputs", "tools", "tool_choice", "continue_final_message", "lora_name", *TEXT_FIELDS)
_PARAM_NAMES |= {name: name for name in _OTHER_NAMES}
_USUAL_NAMES = {"tenant": "user", "beam_width": "n"}
_LEADING_NAME = re.compile(rf"(?:messages|tools|{'|'.join(TEXT_FIELDS)})\[\d+\]|\w+")


class ErrorBody(msgspec.Struct, kw_only=True):
    """Details of an error."""

    message: str
    type: str
    param: str | None = None
    """Name of the invalid field, if there is one."""
    code: str | None = None


class ErrorResponse(msgspec.Struct):
    """OpenAI's shape of an error."""

    error: ErrorBody


class ApiError(Exception):
    """Ends a request with an HTTP status. Handlers and middleware raise it; Application sends the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.request_id: str | None = None

    def to_response(self, path: str) -> Response:
        """The response, in the format of this path's protocol."""
        return Response(self.to_json(path), self.status, self.headers, media_type="application/json")

    def to_json(self, path: str) -> bytes:
        """The body alone, which is also used in events of a stream."""
        if path.startswith(OLLAMA_PATH):
            return msgspec.json.encode({"error": self._text()})
        if f"{path}/".startswith(COHERE_PATHS):
            return msgspec.json.encode({"id": self.request_id, "message": self._text()})
        body = self._anthropic_body() if path.startswith(ANTHROPIC_PATH) else self._openai_body()
        return msgspec.json.encode(body)

    def _openai_body(self) -> ErrorResponse:
        fallback = "invalid_request_error" if self.status < 500 else "server_error"
        kind = _OPENAI_TYPES.get(self.status, fallback)
        return ErrorResponse(ErrorBody(message=self._text(), type=kind, param=self.param, code=self.code))

    def _anthropic_body(self) -> dict[str, Any]:
        fallback = "invalid_request_error" if self.status < 500 else "api_error"
        kind = _ANTHROPIC_TYPES.get(self.status, fallback)
        said = f"prompt is too long: {self._text()}" if self.code == TOO_LONG else self._text()  # as clients expect it
        return {"type": "error", "error": {"type": kind, "message": said}, "request_id": self.request_id}

    def _text(self) -> str:
        """The message, which may quote a client's text: shortened, and without invalid Unicode."""
        text = self.message.encode("utf-8", "replace").decode()
        return text if len(text) <= MAX_MESSAGE_LEN else text[:MAX_MESSAGE_LEN] + "..."


def protocol_path(scope: Scope) -> str:
    """The path by which a request's errors get their form. OpenAI and Anthropic share that of models; a header says
    which of them is meant, as for the answers there."""
    path: str = scope["path"]
    is_shared = path.startswith("/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])
    return ANTHROPIC_PATH if is_shared else path


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400 response that names the invalid field."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException, request_id: str, field_names: Mapping[str, str]) -> ApiError:
    """The response to any exception. An error of the client is described in full; any other error is logged with the
    request's id, and the response has no internal details. `field_names` maps the engine's names of fields, or those of
    a protocol that this one is translated to, to the body's own; and words of messages, such as `.function`, of which
    the first is replaced. An error that has been through this for the same request is returned as it is."""
    found = _api_error(error, request_id)
    if found.request_id == request_id:
        return found
    found.request_id = request_id
    if words := [re.escape(name) for name in field_names if not name.isidentifier()]:
        found.message = re.sub("|".join(words), lambda match: field_names[match[0]], found.message, count=1)
    name = (found.param or "").partition("[")[0]
    if name in (named := _USUAL_NAMES | dict(field_names)):
        found.param = named[name]
        found.message = _renamed(found.message, name, found.param)
    return found


def _renamed(message: str, name: str, own: str) -> str:
    """The message with a field's own name. One that begins with a part of the field, or another name, follows it."""
    first = (_LEADING_NAME.match(message) or [""])[0]
    if first != name and first.partition("[")[0] in (name, *_PARAM_NAMES):
        return f"{own}: {message}"
    return re.sub(rf"^{name}(?=[=: ])", own, message)


def _api_error(error: BaseException, request_id: str) -> ApiError:
    match error:
        case ApiError():
            return error
        case PromptTooLongError():
            return invalid(str(error), _param(error), TOO_LONG)
        case RequestError():
            return invalid(str(error), _param(error))
        case TokenizerError():  # no chat template, or a broken one
            return invalid(str(error), "prompt")
        case RecursionError():  # only what clients send is nested
            return invalid("the request is nested too deeply", code="invalid_json")
        case QuireError() if not isinstance(error, RequestFailedError):
            logger.error("request %s: %s: %s", request_id, type(error).__name__, error)
            message, retry_s = "the engine cannot serve this request at the moment; try again later", None
            if isinstance(error, EngineDeadError):
                retry_s = error.retry_after_s
            headers = None if retry_s is None else {"retry-after": str(retry_s)}
            return ApiError(503, message, code="engine_unavailable", headers=headers)
    logger.error("request %s failed", request_id, exc_info=error)
    return ApiError(500, f"internal error; see the server's log for request id {request_id}", code="internal_error")


def _param(error: RequestError) -> str | None:
    """The field that a message is about: messages begin with its name."""
    found = _LEADING_NAME.match(str(error))
    name = found.group() if found else ""
    if "[" in name:
        return name
    is_of_prompt = isinstance(error, InvalidPromptError | PromptTooLongError)
    return _PARAM_NAMES.get(name, "prompt" if is_of_prompt else None)


def status_error(status: int, method: str, path: str, headers: Mapping[str, str] | None = None) -> ApiError:
    """The response for unknown paths, unsupported methods and other refusals of the router."""
    match status:
        case 404:
            return ApiError(404, f"unknown path {path[:200]!r}; /openapi.json lists all endpoints", code="not_found")
        case 405:
            message = f"{path[:200]!r} does not support the method {method[:20]}"
            return ApiError(405, message, code="method_not_allowed", headers=headers)
    return ApiError(status, HTTPStatus(status).phrase, headers=headers)

"""Every exception Quire raises on purpose.

QuireError
├── ConfigError            an argument of the engine is unknown, out of range, or contradicts another   (ValueError)
├── CheckpointError        a checkpoint is missing, half-written, unsafe or inconsistent
│   ├── UnsupportedModelError   a well-formed checkpoint of an architecture Quire has no model for
│   └── TokenizerError     no tokenizer beside the weights, or one that cannot be read
├── OutOfMemoryError       the machine (or the limit given) has too little memory for what was asked   (MemoryError)
├── RequestError           one request is invalid; only that request fails                             (ValueError)
│   ├── InvalidParamsError a sampling parameter is out of range
│   ├── InvalidPromptError the prompt is empty, malformed or holds ids outside the vocabulary
│   └── PromptTooLongError the prompt does not fit the context; the message names both lengths
├── RequestFailedError     an internal error in the work for one request; only that request fails
├── EngineBrokenError      the engine's internal block accounting is inconsistent, or every step fails: restart it
├── EngineDeadError        the engine process has ended or hung; no request is served until another one starts
└── KernelError            a kernel was called with a shape, stride, dtype or device it does not take  (ValueError)

Each message says what was given, what is allowed, and what to do about it.
"""

import difflib
from collections.abc import Iterable, Sequence
from typing import TypeVar

_Choice = TypeVar("_Choice", bound=str)


class QuireError(Exception):
    """Base of all errors Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An engine argument is unknown, out of range, or contradicts another one."""


class CheckpointError(QuireError):
    """A checkpoint is missing, half-written, unsafe or inconsistent."""


class UnsupportedModelError(CheckpointError):
    """The checkpoint is well-formed, but there is no model for its architecture."""


class TokenizerError(CheckpointError):
    """There is no tokenizer beside the weights, or it cannot be read."""


class OutOfMemoryError(QuireError, MemoryError):
    """The machine, or the limit given, has too little memory for what was asked."""


class RequestError(QuireError, ValueError):
    """One request is invalid; only that request fails."""


class InvalidParamsError(RequestError):
    """A sampling parameter is out of range or contradicts another one."""


class InvalidPromptError(RequestError):
    """The prompt is empty, malformed, or holds token ids outside the vocabulary."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into the context. Many clients know this by the words `maximum context length is`."""


class RequestFailedError(QuireError):
    """An internal error occurred in the work for one request; only that request fails."""


class EngineBrokenError(QuireError):
    """The engine's internal block accounting is inconsistent, or every step fails; only a new engine can continue."""


class EngineDeadError(QuireError):
    """The engine process has ended, hung, or failed to start; the message says why, if the reason is known."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        """`retry_after_s` is when another engine process may be ready; None if none will be started."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KernelError(QuireError, ValueError):
    """A kernel was called with a shape, stride, dtype or device it does not take."""


def failure(request_id: str, when: str, error: BaseException) -> str:
    """Return the message a client gets for an internal error: the exception's type, since its text may be private."""
    return f"request {request_id!r} failed {when}: {type(error).__name__}"


class failures_named:  # noqa: N801
    """A context that replaces every exception that is not a QuireError by a RequestFailedError that names the request.
    Not a generator, as every request is in several of these, and contextlib's take three times as many calls."""

    __slots__ = ("_request_id", "_when")

    def __init__(self, request_id: str, when: str) -> None:
        self._request_id, self._when = request_id, when

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, QuireError):
            raise RequestFailedError(failure(self._request_id, self._when, error)) from error


def nearest_name(name: str, allowed: Iterable[str]) -> str:
    """Return `, did you mean 'x'?` for the allowed name closest to `name`, or an empty string if none is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f", did you mean {matches[0]!r}?" if matches else ""


def check_choice(name: str, value: object, allowed: Sequence[_Choice]) -> _Choice:
    """Return the allowed value that equals `value`. Raises ConfigError with the nearest one if there is none."""
    for choice in allowed:
        if choice == value:
            return choice
    raise ConfigError(f"{name}={value!r}{nearest_name(str(value), allowed)} (allowed: {', '.join(allowed)})")


def error_named(kind: str, message: str) -> QuireError:
    """Make an error again from its class name and message, sent by another process; QuireError for unknown names."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, QuireError):
        return found(message)
    return QuireError(f"{kind}: {message}")

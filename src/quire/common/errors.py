"""Every exception Quire raises on purpose.

QuireError
├── ConfigError            an argument of the engine is unknown, out of range, or contradicts another   (ValueError)
├── CheckpointError        a checkpoint is missing, half-written, unsafe or inconsistent
│   ├── UnsupportedModelError   a well-formed checkpoint of an architecture Quire has no model for
│   └── TokenizerError     no tokenizer beside the weights, or one that cannot be read
├── OutOfMemoryError       the machine (or the limit given) has no room for what was asked             (MemoryError)
├── RequestError           one request is wrong; it alone fails                                        (ValueError)
│   ├── InvalidParamsError a sampling parameter is out of range
│   ├── InvalidPromptError the prompt is empty, malformed or holds ids outside the vocabulary
│   └── PromptTooLongError the prompt does not fit the context; the message names both lengths
├── RequestFailedError     the engine failed in one request's own work; it alone fails
├── EngineBrokenError      the engine's own accounts are wrong, or nothing succeeds any more: it has to be made again
├── EngineDeadError        the engine process has ended or hung; no request can be served until there is another
└── KernelError            a kernel was called with a shape, stride, dtype or device it does not take  (ValueError)

Each message says what was given, what is allowed, and what to do about it.
"""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


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
    """The machine, or the limit given, has no room for what was asked."""


class RequestError(QuireError, ValueError):
    """One request is wrong; it alone fails."""


class InvalidParamsError(RequestError):
    """A sampling parameter is out of range or contradicts another one."""


class InvalidPromptError(RequestError):
    """The prompt is empty, malformed, or holds token ids outside the vocabulary."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into the context."""


class RequestFailedError(QuireError):
    """The engine failed in one request's own work; it alone fails."""


class EngineBrokenError(QuireError):
    """The engine's own accounts are wrong, or no step succeeds any more: nothing but a new engine helps."""


class EngineDeadError(QuireError):
    """The engine process has ended, or did not start; the message says what is known of why."""

    def __init__(self, message: str, retry_after_s: int | None = None) -> None:
        """`retry_after_s`: when there may be another one; None where there will be none."""
        super().__init__(message)
        self.retry_after_s = retry_after_s


class KernelError(QuireError, ValueError):
    """A kernel was called with a shape, stride, dtype or device it does not take."""


def failure(request_id: str, when: str, error: BaseException) -> str:
    """What a request's caller is told of an exception that was not meant for it: its type, since its text may say
    things of the engine that are nobody's business."""
    return f"request {request_id!r} failed {when}: {type(error).__name__}"


@contextmanager
def failures_named(request_id: str, when: str) -> Iterator[None]:
    """Raises a RequestFailedError in place of what nobody meant to raise."""
    try:
        yield
    except QuireError:
        raise
    except Exception as error:
        raise RequestFailedError(failure(request_id, when, error)) from error


def nearest_name(name: str, allowed: Iterable[str]) -> str:
    """`, did you mean 'x'?` for the allowed name closest to `name`, or an empty string if none is close."""
    matches = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f", did you mean {matches[0]!r}?" if matches else ""


def error_named(kind: str, message: str) -> QuireError:
    """The error of this name, made again from what another process tells of it; QuireError for any other name."""
    found = globals().get(kind)
    if isinstance(found, type) and issubclass(found, QuireError):
        return found(message)
    return QuireError(f"{kind}: {message}")

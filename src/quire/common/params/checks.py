"""Checks of single values. An error names the field, the value and what is allowed."""

import math
import re
import reprlib
from collections.abc import Sequence
from typing import Any

from quire.common.errors import InvalidParamsError

_SURROGATE = re.compile("[\ud800-\udfff]")
"""What a string can hold that is no character."""


def refuse(name: str, value: Any, allowed: str) -> InvalidParamsError:
    """Return the error to raise, with the given value (shortened) and what is allowed."""
    return InvalidParamsError(f"{name}={reprlib.repr(value)}: must be {allowed}")


def plain(value: Any) -> Any:
    """Return a number of NumPy or torch as Python's own; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value


def check_number(
    name: str, value: Any, low: float, high: float, allowed: str, *, lowest_excluded: bool = False
) -> None:
    """Raise InvalidParamsError unless `value` is a finite number in the range; `allowed` says the range in words."""
    ok = isinstance(value, int | float) and not isinstance(value, bool)
    if not ok or not low <= value <= high or value in (math.inf, -math.inf) or (lowest_excluded and value == low):
        raise refuse(name, value, allowed)


def check_int(name: str, value: Any, low: int, high: int | None, allowed: str) -> None:
    """Raise InvalidParamsError unless `value` is an integer in the range (high None: no upper end)."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):
        raise refuse(name, value, allowed)


def check_flag(name: str, value: Any) -> None:
    """Raise InvalidParamsError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise refuse(name, value, "True or False")


def check_text(name: str, value: Any, max_len: int) -> None:
    """Raise InvalidParamsError unless `value` is Unicode text of at most `max_len` characters."""
    ok = isinstance(value, str) and len(value) <= max_len
    if not ok or (not value.isascii() and _SURROGATE.search(value)):
        raise refuse(name, value, f"a Unicode string of at most {max_len} characters")


def check_request_id(request_id: Any) -> None:
    """Raise InvalidParamsError unless it is a text of usual length."""
    check_text("request_id", request_id, 4096)


def check_texts(name: str, values: Any, max_num: int, max_len: int) -> None:
    """Raise InvalidParamsError unless these are at most `max_num` non-empty strings of `max_len` characters in all."""
    _check_list(name, values, max_num, "strings")
    left = max_len
    for value in values:
        check_text(name, value, max_len)
        if not value:
            raise InvalidParamsError(f"{name}={reprlib.repr(values)}: an empty string is not allowed; leave it out")
        left -= len(value)
    if left < 0:
        raise InvalidParamsError(f"{name} has {max_len - left} characters in total; at most {max_len} are allowed")


def check_ids(name: str, values: Any, max_num: int) -> None:
    """Raise InvalidParamsError unless these are at most `max_num` token ids, each 0 or larger."""
    _check_list(name, values, max_num, "token ids")
    if set(map(type, values)) != {int} or min(values) < 0:  # many times faster than one by one
        for value in values:
            check_int(name, value, 0, None, "a list of token ids, which are integers from 0")


def _check_list(name: str, values: Any, max_num: int, kind: str) -> None:
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise refuse(name, values, f"a list of {kind}")
    if len(values) > max_num:
        raise InvalidParamsError(f"{name} has {len(values)} {kind}; at most {max_num} are allowed")

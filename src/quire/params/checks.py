"""Bounds of single values, refused with the field, the value and what is allowed."""

import math
from typing import Any

from quire.errors import InvalidParamsError


def check_number(
    name: str, value: Any, low: float, high: float, allowed: str, *, lowest_excluded: bool = False
) -> None:
    """Raise InvalidParamsError unless `value` is a finite number in the range; `allowed` says the range in words."""
    ok = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value < low or value > high or (lowest_excluded and value == low):
        raise InvalidParamsError(f"{name}={value!r}: must be {allowed}")


def check_int(name: str, value: Any, low: int, high: int | None, allowed: str) -> None:
    """Raise InvalidParamsError unless `value` is an integer in the range (high None: no upper end)."""
    ok = isinstance(value, int) and not isinstance(value, bool)
    if not ok or value < low or (high is not None and value > high):
        raise InvalidParamsError(f"{name}={value!r}: must be {allowed}")

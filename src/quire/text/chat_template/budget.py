"""Limits on the time and the size of values while a chat template is rendered. Knows nothing of Jinja's syntax.

A list that contains the same list twice, which contains another list twice, and so on, takes exponential time to
compare, print or hash. So the size of a list is the length of its text, with repeated parts counted each time; the size
of each list is computed once.

Covered are loops (nested and recursive too); calls of macros, methods and functions; filters, tests, operators,
comparisons and slices; padding and formatting; and all printed text, also in macros and `{% set %}` blocks. Sizes are
checked before a value of that size is made. Time is checked between operations, of which the slowest take a second.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from contextvars import ContextVar, Token
from itertools import chain
from types import GeneratorType
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace

MAX_OPERATIONS = 500_000
"""Loop steps and calls in one rendering; they take about a second."""
MAX_SECONDS = 1.5
"""Processor time of one rendering."""
MAX_TEXT_CHARS = 16_000_000
"""Length of a single text, including the finished prompt."""
MAX_ITEMS = 1_000_000
"""Length of a single list."""
MAX_BITS = 10_000
"""Bits of a single number."""
MAX_PRINTED_CHARS = 64_000_000
"""Characters printed in total, also in macros and blocks; also the length of a list's text and of a formatted text."""
MAX_COPIED_BYTES = 1_000_000_000
"""Bytes of all values that operators, filters and calls make."""
MAX_WIDTH = 10_000
"""Width to pad or indent to."""

_ITEM_CHARS = 4
"""Characters that an item adds to the text of its container."""
_ITEM_BYTES = 32
"""Approximate memory of an item, including what this module keeps for its container."""
_PADDING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDE_FIELD = re.compile(r"(\{[^{}]*|%[-+ #.\d]*)(\d{5,})|\{[^{}]+\{|%[-+ #.\d]*\*")
"""Matches a field of a format whose width has five or more digits or is computed."""
_DIGITS = re.compile(r"\d{1,4}")
_SPACES = [char for char in map(chr, range(0x3001)) if char.isspace()]
_CONTAINERS = (list, tuple, set, frozenset, Mapping, KeysView, ValuesView, ItemsView)


class Budget:
    """The budget of one rendering, in effect within its `with` block."""

    __slots__ = ("_cpu_ends_s", "_ends_s", "_known", "_num_copied", "_num_operations", "_num_printed", "_token")

    def __enter__(self) -> Budget:
        self._num_operations = self._num_printed = self._num_copied = 0
        self._cpu_ends_s = time.thread_time() + MAX_SECONDS
        self._ends_s = time.monotonic() + MAX_SECONDS  # never later, and faster to check
        self._known: dict[int, tuple[Any, int]] = {}  # id of a list -> the list, the length of its text
        self._token: Token[Budget] = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def spend(self, operations: int, printed: int, copied: int) -> None:
        """Add to the counters. Raises SecurityError if one exceeds its limit or the time is over."""
        self._num_operations += operations
        self._num_printed += printed
        self._num_copied += copied
        if (
            self._num_operations > MAX_OPERATIONS
            or self._num_printed > MAX_PRINTED_CHARS
            or self._num_copied > MAX_COPIED_BYTES
            or (time.monotonic() > self._ends_s and time.thread_time() > self._cpu_ends_s)
        ):
            raise SecurityError("it runs too long or produces too much text")

    def num_chars(self, value: Any) -> int:
        """Return the approximate length of `str(value)` without making it. Raises SecurityError if it is too long."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, Namespace):
            return self.num_chars(dict(value._Namespace__attrs))
        if not isinstance(value, _CONTAINERS):
            return _ITEM_CHARS
        if (known := self._known.get(id(value))) is not None:
            return known[1]
        items: Iterable[Any] = chain(value.keys(), value.values()) if isinstance(value, Mapping) else value
        total = sum(_ITEM_CHARS + self.num_chars(item) for item in items)
        if total > MAX_PRINTED_CHARS:
            raise SecurityError(f"it creates a list whose text has more than {MAX_PRINTED_CHARS} characters")
        self._known[id(value)] = value, total
        self.spend(0, 0, _ITEM_BYTES * len(value))
        return total


_current: ContextVar[Budget] = ContextVar("template_budget")


def spend(operations: int = 0, printed: int = 0, copied: int = 0) -> None:
    """Add to the counters of the current rendering, and check its time. Raises LookupError if none is running."""
    _current.get().spend(operations, printed, copied)


def measured(value: Any) -> Any:
    """Return the result of an operation after checking its size; a generator is timed at each item."""
    if isinstance(value, str):
        check_size(len(value))
        spend(copied=sys.getsizeof(value))
    elif isinstance(value, _CONTAINERS):
        check_items(len(value))
        _current.get().num_chars(value)
    elif isinstance(value, GeneratorType):
        return _timed(value)
    else:
        _check_bits(value)
        spend()
    return value


def _timed(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        spend()
        yield value


def check_size(num: int) -> None:
    """Raise SecurityError if a text is too long."""
    if num > MAX_TEXT_CHARS:
        raise SecurityError(f"it creates a text of more than {MAX_TEXT_CHARS} characters")


def check_items(num: int) -> None:
    """Raise SecurityError if a list, or something that takes as long to process, has too many items."""
    if num > MAX_ITEMS:
        raise SecurityError(f"it creates or processes a list of more than {MAX_ITEMS} items")


def check_width(values: Iterable[Any]) -> None:
    """Raise SecurityError if a number among the values, or the length of a text among them, is too large a width."""
    widths = (len(value) if isinstance(value, str) else value for value in values)
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise SecurityError(f"it pads text to more than {MAX_WIDTH} characters")


def check_binary(operator: str, left: Any, right: Any) -> None:
    """Raise SecurityError if an operator would give too large a result for these operands."""
    _check_bits(left)
    _check_bits(right)
    if operator == "*":
        for value, times in ((left, right), (right, left)):
            if isinstance(times, int):
                (check_size if isinstance(value, str) else check_items)(num_items(value) * times)
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_num_bits(left.bit_length() * abs(right))
    elif operator == "%" and isinstance(left, str):
        _check_format(left, "%", [right])


def check_method(text: str, name: str, args: Sequence[Any]) -> None:
    """Raise SecurityError if a method of a text would give too large a result."""
    if name in _PADDING_METHODS:
        check_width(args)
        widths = [value for value in args if isinstance(value, int)]
        check_size(len(text) + (text.count("\t") * max(widths, default=8) if name == "expandtabs" else 0))
    elif name in ("format", "format_map"):
        _check_format(text, "{", args)
    elif name == "join" and args:
        check_size(sum(map(num_items, args[0])) + len(text) * len(args[0]))
    elif name == "replace" and len(args) >= 2:
        check_size(len(text) + text.count(args[0]) * num_items(args[1]))
    elif name in ("split", "rsplit", "splitlines"):
        separator = next((value for value in args if isinstance(value, str) and value), None)
        check_items(text.count(separator) if separator else sum(map(text.count, _SPACES)))


def num_items(value: Any) -> int:
    """Return the number of characters of a text or items of a list; 0 for anything else."""
    return len(value) if isinstance(value, str | list | tuple) else 0


def num_chars(value: Any) -> int:
    """Return the approximate length of `str(value)` without making it. Raises SecurityError if it is too long."""
    num = _current.get().num_chars(value)
    check_size(num)
    return num


def text_of(value: Any) -> str:
    """Return `str(value)`. Raises SecurityError if it would be too long."""
    num_chars(value)
    return str(value)


def _check_format(layout: str, mark: str, values: Sequence[Any]) -> None:
    if _WIDE_FIELD.search(layout):
        raise SecurityError("it formats text with a field of a huge or computed width")
    widths = [int(digits) for digits in _DIGITS.findall(layout)]
    if layout.count(mark) * max([*widths, *map(num_chars, values)], default=0) > MAX_PRINTED_CHARS:
        raise SecurityError(f"it formats a text of more than {MAX_PRINTED_CHARS} characters")


def _check_bits(value: Any) -> None:
    if isinstance(value, int):
        _check_num_bits(value.bit_length())


def _check_num_bits(num: int) -> None:
    if num > MAX_BITS:
        raise SecurityError(f"it creates a number of more than {MAX_BITS} bits")

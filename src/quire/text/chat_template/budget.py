"""What rendering a chat template may take, and how large anything in it may become. Knows nothing of Jinja's syntax.

Two lists that hold two lists each, and so on, are soon endless to whoever compares them, writes them down or hashes
them. So a list is as long as its text would be, however often a part of it is the same, and that is kept by list.

Covered: loops, nested and recursive ones too; calls of macros, methods and functions; filters, tests, operators,
comparisons and slices; padding and formatting; everything printed, also inside macros and `{% set %}` blocks. Sizes
are looked at before anything of that size is made; time between operations, of which the slowest take a second.
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
"""loop steps and calls of one rendering: about a second"""
MAX_SECONDS = 1.5
"""of processor time"""
MAX_TEXT_CHARS = 16_000_000
"""of any one text, the finished prompt included"""
MAX_ITEMS = 1_000_000
"""of any one list"""
MAX_BITS = 10_000
"""of any one number"""
MAX_PRINTED_CHARS = 64_000_000
"""printed in all, in macros and blocks too; also of what a list holds, and of a text that is formatted"""
MAX_COPIED_BYTES = 1_000_000_000
"""of all that operators, filters and calls make"""
MAX_WIDTH = 10_000
"""to pad or indent to"""

_ITEM_CHARS = 4
"""that an item takes in the text of what holds it"""
_ITEM_BYTES = 32
"""that it takes in memory, about, with what is kept of what holds it"""
_PADDING_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
_WIDE_FIELD = re.compile(r"(\{[^{}]*|%[-+ #.\d]*)(\d{5,})|\{[^{}]+\{|%[-+ #.\d]*\*")
"""a field of a format whose width has five digits or more, or is computed"""
_DIGITS = re.compile(r"\d{1,4}")
_SPACES = [char for char in map(chr, range(0x3001)) if char.isspace()]
_CONTAINERS = (list, tuple, set, frozenset, Mapping, KeysView, ValuesView, ItemsView)


class Budget:
    """Within its `with` block, `spend` and `num_chars` count."""

    __slots__ = ("_cpu_ends_s", "_ends_s", "_known", "_num_copied", "_num_operations", "_num_printed", "_token")

    def __enter__(self) -> Budget:
        self._num_operations = self._num_printed = self._num_copied = 0
        self._cpu_ends_s = time.thread_time() + MAX_SECONDS
        self._ends_s = time.monotonic() + MAX_SECONDS  # never after the other, and many times faster to look at
        self._known: dict[int, tuple[Any, int]] = {}  # by what `id` says of a list: itself, its length as text
        self._token: Token[Budget] = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)

    def spend(self, operations: int, printed: int, copied: int) -> None:
        """Raises SecurityError when something is used up."""
        self._num_operations += operations
        self._num_printed += printed
        self._num_copied += copied
        if (
            self._num_operations > MAX_OPERATIONS
            or self._num_printed > MAX_PRINTED_CHARS
            or self._num_copied > MAX_COPIED_BYTES
            or (time.monotonic() > self._ends_s and time.thread_time() > self._cpu_ends_s)
        ):
            raise SecurityError("it runs without end or makes too much text")

    def num_chars(self, value: Any) -> int:
        """Of `str(value)`, about, without making it. Raises SecurityError for too many."""
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
            raise SecurityError(f"it makes a list with a text of more than {MAX_PRINTED_CHARS} characters")
        self._known[id(value)] = value, total
        self.spend(0, 0, _ITEM_BYTES * len(value))
        return total


_current: ContextVar[Budget] = ContextVar("template_budget")


def spend(operations: int = 0, printed: int = 0, copied: int = 0) -> None:
    """Of the rendering that runs in this context; LookupError if none does. It looks at the time in any case."""
    _current.get().spend(operations, printed, copied)


def measured(value: Any) -> Any:
    """What an operation has made, if it is not too large; items that are still to come are timed."""
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
    """Of a text."""
    if num > MAX_TEXT_CHARS:
        raise SecurityError(f"it makes a text of more than {MAX_TEXT_CHARS} characters")


def check_items(num: int) -> None:
    """Of a list, or of what is as slow."""
    if num > MAX_ITEMS:
        raise SecurityError(f"it makes or goes through a list of more than {MAX_ITEMS} items")


def check_width(values: Iterable[Any]) -> None:
    """Numbers among them, and texts to indent with."""
    widths = (len(value) if isinstance(value, str) else value for value in values)
    if any(isinstance(width, int) and width > MAX_WIDTH for width in widths):
        raise SecurityError(f"it pads text to more than {MAX_WIDTH} characters")


def check_binary(operator: str, left: Any, right: Any) -> None:
    """What an operator will make of these."""
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
    """What a method of a text will make."""
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
    """Characters of a text, items of a list; 0 for anything else."""
    return len(value) if isinstance(value, str | list | tuple) else 0


def num_chars(value: Any) -> int:
    """Of `str(value)`, about, without making it. Raises SecurityError for too many."""
    num = _current.get().num_chars(value)
    check_size(num)
    return num


def text_of(value: Any) -> str:
    """`str(value)`. Raises SecurityError where that would be huge."""
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
        raise SecurityError(f"it makes a number of more than {MAX_BITS} bits")

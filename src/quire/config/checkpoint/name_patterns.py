"""Regular expressions in the files of checkpoints and adapters, which are not trusted, for names of modules.

Python's `re` tries one way through a pattern after another, and a pattern can have more ways than could ever be tried.
Here all ways are followed at once, as in Thompson, "Regular expression search algorithm" (1968): a part of a pattern
takes the set of places in the name where it may begin and returns the set of those where it may end, as the bits of
an integer. The work is counted, and limited for all patterns of a file together.
"""

import functools
import importlib
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from quire.common.errors import CheckpointError, UnsupportedModelError

MAX_STEPS = 10_000_000
"""How many parts of patterns are matched for one file: about 5 s."""
_MAX_PATTERNS = 4096
_MAX_PATTERN = 2000
_MAX_CHARS = 2**16
"""Of all patterns with choices of a file, which take time and memory to compile: about 2 s."""
_MAX_GROUPS = 100
_parser: Any = importlib.import_module("re._parser")
_compile: Any = importlib.import_module("re._compiler").compile
_PLAIN = re.compile(r"(?:[\w.\-/]|\\[.\-/])*", re.ASCII)
"""Patterns without choices, for which `re` takes time in proportion to their length."""
_CLASSES = ("NOT_LITERAL", "ANY", "IN")
"""What `re` calls parts that match one character of several."""
_WORD = re.compile(r"\w").fullmatch


class NamePatterns:
    """Compiles the patterns of one file."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._steps = max_steps
        self._num_patterns = self._num_chars = 0
        self._name, self._source = _Name("", self), ""

    def compile(self, source: str, text: str) -> "NamePattern":
        """Raises CheckpointError, which begins with `source`, for a malformed pattern, and UnsupportedModelError for a
        very long one, for one too many, for patterns that are too long together, and for back references, look-behind,
        atomic groups and flags."""
        self._num_patterns += 1
        if self._num_patterns > _MAX_PATTERNS:
            raise UnsupportedModelError(f"{source}: more than {_MAX_PATTERNS:,} patterns")
        shown = f"{source} has the pattern {text[:80]!r}"
        if len(text) > _MAX_PATTERN or text.count("(") > _MAX_GROUPS:
            raise UnsupportedModelError(
                f"{shown}; at most {_MAX_PATTERN:,} characters and {_MAX_GROUPS} groups are allowed"
            )
        if _PLAIN.fullmatch(text):
            return _PlainPattern(text)
        self._num_chars += len(text)
        if self._num_chars > _MAX_CHARS:
            raise UnsupportedModelError(f"{source}: patterns of more than {_MAX_CHARS:,} characters together")
        try:
            return _SetPattern(_parsed(text), source, self)
        except _UnsupportedPartError:
            raise UnsupportedModelError(
                f"{shown}; back references, look-behind, atomic groups and flags are not supported here"
            ) from None
        except (re.error, OverflowError) as error:
            raise CheckpointError(f"{shown}: {error}") from error

    def places(self, source: str, text: str) -> "_Name":
        """The places of a name, which all patterns share that are matched with it one after the other. `source`: of the
        pattern that is matched now."""
        self._source = source
        if text != self._name.text:
            self._name = _Name(text, self)
        return self._name

    def spend(self, num_steps: int) -> None:
        """Count work. Raises UnsupportedModelError when the limit is reached."""
        self._steps -= num_steps
        if self._steps < 0:
            raise UnsupportedModelError(f"{self._source} has patterns that take too long to match; make them simpler")


class NamePattern(Protocol):
    """A compiled pattern. Both methods raise UnsupportedModelError if matching takes too long."""

    def starts(self, name: str) -> bool:
        """Whether the name begins with a match."""

    def ends(self, name: str) -> bool:
        """Whether the whole name matches, or all of it after one of its dots."""


class _PlainPattern:
    def __init__(self, text: str) -> None:
        self._start, self._end = re.compile(text), re.compile(rf"(?:.*\.)?{text}\Z")

    def starts(self, name: str) -> bool:
        return self._start.match(name) is not None

    def ends(self, name: str) -> bool:
        return self._end.match(name) is not None


class _SetPattern:
    def __init__(self, part: "_Part", source: str, patterns: NamePatterns) -> None:
        self._part, self._places = part, functools.partial(patterns.places, source)

    def starts(self, name: str) -> bool:
        return self._part(self._places(name), 1) != 0

    def ends(self, name: str) -> bool:
        places = self._places(name)
        return bool(self._part(places, 1 | places.of_char.get(".", 0) << 1) & places.end)


class _Name:
    """A name, and its places as bits: `1 << i` is the place before character i."""

    def __init__(self, text: str, patterns: NamePatterns) -> None:
        self.text, self.spend = text, patterns.spend
        self.spend(len(text) // 8)
        self.end = 1 << len(text)
        self._accepted: dict[Callable[[str], object], int] = {}
        self.of_char: dict[str, int] = {}
        for place, char in enumerate(text):
            self.of_char[char] = self.of_char.get(char, 0) | 1 << place

    def where(self, accepts: Callable[[str], object]) -> int:
        """The places before the characters that are accepted."""
        if accepts not in self._accepted:
            self.spend(len(self.of_char) // 2)
            self._accepted[accepts] = sum(places for char, places in self.of_char.items() if accepts(char))
        return self._accepted[accepts]


_Part = Callable[[_Name, int], int]
"""Takes a name and the places where the part may begin; returns those where it may end."""


class _UnsupportedPartError(Exception):
    """A pattern has a part that is not supported."""


def _parsed(text: str) -> _Part:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of syntax that will change
        parsed = _parser.parse(text)
    if parsed.state.flags & ~re.UNICODE:
        raise _UnsupportedPartError
    return _sequence(parsed)


def _sequence(parsed: Any) -> _Part:
    parts = [_part(*each) for each in parsed]

    def match(name: _Name, places: int) -> int:
        name.spend(1 + len(parts))
        for part in parts:
            if not places:
                break
            places = part(name, places)
        return places

    return match


def _part(kind: Any, value: Any) -> _Part:
    match str(kind):
        case "LITERAL":
            return lambda name, places: (places & name.of_char.get(chr(value), 0)) << 1
        case "NOT_LITERAL" | "ANY" | "IN":
            accepts = _class(kind, value)
            return lambda name, places: (places & name.where(accepts)) << 1
        case "BRANCH":
            return _any_of([_sequence(branch) for branch in value[1]])
        case "SUBPATTERN" if not (value[1] or value[2]):
            return _sequence(value[3])
        case "MAX_REPEAT" | "MIN_REPEAT":
            fewest, most, body = value
            is_run = most == _parser.MAXREPEAT and len(body) == 1 and str(body[0][0]) in _CLASSES
            return _repeat(int(fewest), int(most), _sequence(body), _class(*body[0]) if is_run else None)
        case "AT":
            return _at(str(value))
        case "ASSERT" | "ASSERT_NOT" if value[0] > 0:
            return _look_ahead(_sequence(value[1]), str(kind) == "ASSERT")
    raise _UnsupportedPartError


def _class(kind: Any, value: Any) -> Callable[[str], object]:
    """What tells whether a character is one of a class: `re` itself."""
    return _compiled(kind, tuple(value) if isinstance(value, list) else value)


@functools.lru_cache(256)
def _compiled(kind: Any, value: Any) -> Callable[[str], object]:
    pattern: re.Pattern[str] = _compile(_parser.SubPattern(_parser.State(), [(kind, value)]), re.UNICODE)
    return pattern.fullmatch


def _any_of(branches: Sequence[_Part]) -> _Part:
    def match(name: _Name, places: int) -> int:
        found = 0
        for branch in branches:
            found |= branch(name, places)
        return found

    return match


def _repeat(fewest: int, most: int, body: _Part, accepts: Callable[[str], object] | None) -> _Part:
    """`accepts`: which characters the body matches, if it matches one, and any number of them may follow."""

    def match(name: _Name, places: int) -> int:
        for _ in range(fewest):
            before, places = places, body(name, places)
            if places in (0, before):
                break
        if accepts is not None:  # a sum carries each place to the end of the characters that follow it
            chars = name.where(accepts)
            return ((places & chars) + chars ^ chars) | places
        found = new = places
        for _ in range(fewest, most):
            new = body(name, new) & ~found  # fewer repetitions reach what is found already
            if not new:
                break
            found |= new
        return found

    return match


def _at(kind: str) -> _Part:
    def places_of(name: _Name) -> int:
        if kind in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return 1
        if kind in ("AT_END", "AT_END_STRING"):
            return name.end | (name.of_char.get("\n", 0) & name.end >> 1 if kind == "AT_END" else 0)
        words = name.where(_WORD)
        boundaries = words ^ words << 1
        return boundaries if kind == "AT_BOUNDARY" else ~boundaries

    return lambda name, places: places & places_of(name)


def _look_ahead(part: _Part, is_wanted: bool) -> _Part:
    def match(name: _Name, places: int) -> int:
        name.spend(1 + places.bit_length() // 4)
        each = (1 << place for place in range(places.bit_length()) if places >> place & 1)
        return sum(place for place in each if bool(part(name, place)) == is_wanted)

    return match

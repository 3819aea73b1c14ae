"""Request bodies: received within limits, decoded strictly, with their unknown fields reported."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect, Request

from quire.server.http.errors import OLLAMA_PATH, ApiError, invalid
from quire.server.http.state import ServerState, context_of, state_of

T = TypeVar("T", bound=msgspec.Struct)
MAX_NAMED_FIELDS = 10
MAX_MARKS = {b",": 1_000_000, b":": 200_000, b"[": 200_000, b"{": 200_000}
"""Limits on characters in a body, strings included, so that decoding takes less than half a second."""
_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 19
_QUICK_BYTES = 64 * 1024
"""Bodies up to this size are decoded at once, larger ones in a thread."""
MAX_BODIES = 16
"""Limit on all bodies that are being received, as a multiple of the largest allowed body."""
_SMALL_BYTES = 1024**2
"""Bodies up to this size are always accepted, unless they have many values."""
_FEW_VALUES = 20_000
MAX_VALUES = 20_000_000
"""Limit on the values in the bodies of all running requests, estimated by characters. Each takes up to 100 bytes, and
up to 300 with what a conversation is converted to. Bodies with _FEW_VALUES do not count."""
_PLACE = re.compile(r"(?P<what>.*) - at `(?P<key>key` in `)?\$\.?(?P<where>.*)`", re.DOTALL)  # its last place
_STEP = re.compile(r"\[|\b[A-Za-z_]\w*")  # of a place such as `tools[0].type`: tools, [, type
_TYPES = re.compile(r"Expected `([\w |]+)`, got `(\w+)`")
_IN_WORDS = {
    "int": "an integer", "float": "a number", "str": "a string", "bool": "a boolean", "array": "an array",
    "object": "an object",
}  # fmt: skip
"""The decoder's names of types. Others, such as null, are words of JSON."""
_MISSING = re.compile(r"missing required field `(\w+)`")


async def read_struct(request: Request, kind: type[T]) -> T:
    """The request's body as a struct. Raises ApiError: 400, 408, 413, 415, or 429 where many large bodies come at once.
    Unknown fields go into the context."""
    _check_media_type(request)
    state, raw = state_of(request), bytearray()
    try:
        await _read(request, state, raw)
        _count_values(request, state, raw)
        if len(raw) <= _QUICK_BYTES:
            body, unknown = decode(raw, kind)
        else:
            body, unknown = await asyncio.to_thread(decode, raw, kind)
    finally:
        state.num_body_bytes -= len(raw)
    context_of(request).unknown_fields += unknown
    return body


def decode(raw: bytes | bytearray, kind: type[T]) -> tuple[T, list[str]]:
    """Decode JSON to a struct; also returns the names of unknown fields. Raises ApiError (400 or 413)."""
    for mark, limit in MAX_MARKS.items():
        if (count := raw.count(mark)) > limit:
            message = (
                f"the body contains the character {mark.decode()!r} {count:,} times; at most {limit:,} are allowed"
            )
            raise ApiError(413, message, code="request_too_large")
    has_long_numbers = _LONG_NUMBER in raw.translate(_TO_ZERO)  # many times faster than a pattern
    try:
        data = msgspec.json.decode(raw)
        json.loads(raw, object_pairs_hook=_check_keys, parse_int=_check_int if has_long_numbers else None)
        _make_integers(data, kind)
        body = msgspec.convert(data, kind, strict=True)
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error), kind) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is not valid JSON in UTF-8: {json_fault(error)}", code="invalid_json") from None
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    return body, list(_unknown_fields(data, body, ""))


def _make_integers(data: Any, kind: type) -> None:
    """Replace floats without a fraction by integers in the fields of a struct that take no other numbers."""
    fields = _integer_fields(kind)
    for name, value in data.items() if isinstance(data, dict) else ():
        if isinstance(value, dict) and (inner := fields.get(name)) is not None:
            _make_integers(value, inner)
        elif isinstance(value, float) and fields.get(name, kind) is None and value.is_integer() and abs(value) < 2**53:
            data[name] = int(value)


@lru_cache
def _integer_fields(kind: type) -> dict[str, type | None]:
    """The fields of a struct that may be integers, and not floats; and those that are structs, with their types."""
    info, found = inspect.type_info(kind), dict[str, type | None]()
    for field in info.fields if isinstance(info, inspect.StructType) else ():
        kinds = {type(one): one for one in _alternatives([field.type])}
        if isinstance(struct := kinds.get(inspect.StructType), inspect.StructType):
            found[field.encode_name] = struct.cls
        elif inspect.IntType in kinds and inspect.FloatType not in kinds:
            found[field.encode_name] = None
    return found


def json_fault(error: Exception) -> str:
    """What msgspec says is wrong with JSON. Of half a surrogate pair near the end it says that the end is missing."""
    return str(error).replace("Input data was truncated", "it ends too early, or a \\u escape is half a surrogate pair")


def warning(unknown_fields: list[str]) -> str:
    """The value of `x-quire-warning`: printable ASCII, of bounded length."""
    names = [re.sub(r"[^\w.\[\]-]", "?", name[:64], flags=re.ASCII) for name in unknown_fields[:MAX_NAMED_FIELDS]]
    more = len(unknown_fields) - len(names)
    return f"unknown fields ignored: {', '.join(names)}{f' and {more} more' if more else ''}"


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_ollama = request.scope.get("path", "").startswith(OLLAMA_PATH)
    if is_ollama and media_type == "application/x-www-form-urlencoded" and "origin" not in request.headers:
        media_type = ""  # curl names this type unless told otherwise; a browser's form has an origin, too
    needs_type = media_type or "origin" in request.headers  # a page of any site can send a body without a type
    if needs_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, f"content-type is {media_type[:100]!r}; it must be application/json")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise ApiError(415, f"content-encoding is {encoding[:100]!r}; send the body without an encoding")


async def _read(request: Request, state: ServerState, body: bytearray) -> None:
    """Receive a body up to the limit. A body whose content-length exceeds it is not read at all."""
    limit, timeout_s = state.args.max_body, state.args.body_timeout_s
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and (len(stated) > 18 or int(stated) > limit):
        raise _too_large(limit)
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in request.stream():
                if len(body) + len(chunk) > limit:
                    raise _too_large(limit)
                body += chunk
                state.num_body_bytes += len(chunk)
                if len(body) > _SMALL_BYTES and state.num_body_bytes > MAX_BODIES * limit:
                    raise _busy("too many large bodies are being received")
    except TimeoutError:
        raise ApiError(
            408, f"the body was not received within {timeout_s:g} s", headers={"connection": "close"}
        ) from None
    except ClientDisconnect:
        raise ApiError(400, "the client disconnected before the body was complete") from None


def _count_values(request: Request, state: ServerState, raw: bytearray) -> None:
    """Count the values of a body until its request ends. Raises ApiError (429)."""
    num_values = sum(map(raw.count, b",[{")) if len(raw) > _FEW_VALUES else 0
    if num_values <= _FEW_VALUES:
        return
    if state.num_values + num_values > MAX_VALUES:
        raise _busy("the bodies of the running requests have too many values")
    state.num_values += num_values

    def release() -> None:
        state.num_values -= num_values

    context_of(request).at_end.callback(release)


def _busy(reason: str) -> ApiError:
    headers = {"connection": "close", "retry-after": "5"}
    return ApiError(429, f"{reason}; try again in 5 s", code="busy", headers=headers)


def _too_large(limit: int) -> ApiError:
    message = f"the body is longer than the limit of {limit:,} bytes"
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def _check_int(digits: str) -> None:
    if not -(2**63) <= int(digits) < 2**63:
        raise invalid(f"the number {digits[:40]} does not fit into 64 bits", code="invalid_json")


def _check_keys(pairs: list[tuple[str, Any]]) -> None:
    """Refuse duplicate fields, between which two parsers might choose differently."""
    if len(dict(pairs)) < len(pairs):
        ((key, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise invalid(f"the field {key[:100]!r} occurs twice", key[:100], "duplicate_field")


def _wrong_field(message: str, kind: type) -> ApiError:
    """Convert the decoder's message: "Expected `int`, got `str` - at `$.max_tokens`"."""
    found = _PLACE.fullmatch(message)
    what, where = (found["what"], found["where"]) if found else (message, "")
    if missing := _MISSING.search(what):
        where, what = f"{where}.{missing.group(1)}".removeprefix("."), "this field is required"
    if types := _TYPES.fullmatch(what):
        what = f"expected {_in_words(types[1])}, got {_in_words(types[2])}"
    what = what.replace("`", "")
    what = ("a key: " if found and found["key"] else "") + what[:1].lower() + what[1:]
    if what.startswith("invalid ") and (allowed := _allowed(kind, where)):
        what += f" (allowed: {', '.join(allowed)})"
    is_field = where[:1].isalpha()
    return invalid(f"{where}: {what}" if is_field else f"invalid body: {what}", where if is_field else None)


def _in_words(types: str) -> str:
    """Such as `a number or null` for `float | null`."""
    *others, last = [_IN_WORDS.get(name, name) for name in types.split(" | ")]
    return f"{', '.join(others)} or {last}" if others else last


def _allowed(kind: type, where: str) -> list[str]:
    """The texts that a place in a body may have; none if it is not a choice."""
    kinds = [inspect.type_info(kind)]
    for step in _STEP.findall(where):
        kinds = [inner for outer in _alternatives(kinds) for inner in _inside(outer, step)]
    choices = [one for one in _alternatives(kinds) if isinstance(one, inspect.LiteralType)]
    return sorted({str(value) for choice in choices for value in choice.values})


def _alternatives(kinds: list[inspect.Type]) -> Iterator[inspect.Type]:
    for kind in kinds:
        yield from kind.types if isinstance(kind, inspect.UnionType) else (kind,)


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """The types of what is one step inside."""
    match kind:
        case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner) if step == "[":
            yield inner
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            yield from (field.type for field in fields if field.encode_name == step)
            if step == tag_field:
                yield inspect.LiteralType((tag,))


def _unknown_fields(data: Any, made: Any, where: str) -> Iterator[str]:
    """Paths of fields in the data that the struct does not have, without those that are null."""
    if isinstance(made, msgspec.Struct) and isinstance(data, dict):
        names = dict(zip(made.__struct_encode_fields__, made.__struct_fields__, strict=True))
        for key, value in data.items():
            if key in names and isinstance(value, dict | list):
                yield from _unknown_fields(value, getattr(made, names[key]), f"{where}{key}.")
            elif value is not None and key not in names and key != made.__struct_config__.tag_field:
                yield where + key
    elif isinstance(made, list) and isinstance(data, list) and made and isinstance(made[0], msgspec.Struct):
        for i, (item, struct) in enumerate(zip(data, made, strict=True)):
            yield from _unknown_fields(item, struct, f"{where.removesuffix('.')}[{i}].")

"""Reads messages of protocol buffers, without code made from their definitions.

Encoding: https://protobuf.dev/programming-guides/encoding/. A message is a list of fields, each a number, a kind and a
value. Every length is checked against the bytes that are left before anything is copied.
"""

from collections.abc import Iterator

from quire.common.errors import TokenizerError

_VARINT, _OCTETS = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
"""For each kind of values of a fixed size, how many bytes they have."""
_MAX_FIELDS = 2**21
_MAX_VARINT_BYTES = 10


class Message:
    """The fields of one message by their numbers. Unknown ones are kept and cost nothing further.

    The getters raise TokenizerError for a value of another kind. Of a field that appears more than once, the last
    counts, as the format says.
    """

    __slots__ = ("_values", "name")

    def __init__(self, data: bytes, name: str) -> None:
        """Raises TokenizerError if `data` is truncated or malformed, or has too many fields."""
        self.name = name
        """What the message is, for error messages."""
        self._values: dict[int, list[int | bytes]] = {}
        for count, (number, value) in enumerate(self._fields(data)):
            if count == _MAX_FIELDS:
                raise self._wrong(f"more than {_MAX_FIELDS} fields")
            self._values.setdefault(number, []).append(value)

    def all_octets(self, number: int) -> list[bytes]:
        """The values of a repeated field of strings, bytes or messages."""
        values = self._values.get(number, [])
        if not all(isinstance(value, bytes) for value in values):
            raise self._wrong(f"field {number} must be bytes")
        return values  # type: ignore[return-value]

    def octets(self, number: int, default: bytes = b"") -> bytes:
        """A field of bytes, or one of fixed size as its bytes."""
        return (self.all_octets(number) or [default])[-1]

    def text(self, number: int) -> str:
        """A string; empty if there is none."""
        try:
            return self.octets(number).decode()
        except UnicodeDecodeError:
            raise self._wrong(f"field {number} is not valid UTF-8") from None

    def integer(self, number: int, default: int) -> int:
        """A signed integer, or a member of an enumeration."""
        value = self._values.get(number, [default])[-1]
        if isinstance(value, bytes):
            raise self._wrong(f"field {number} must be an integer")
        return value - 2**64 if value >= 2**63 else value

    def flag(self, number: int, default: bool) -> bool:
        """A truth value."""
        return self.integer(number, default) != 0

    def _fields(self, data: bytes) -> Iterator[tuple[int, int | bytes]]:
        position, end = 0, len(data)
        while position < end:
            key, position = self._varint(data, position)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                value, position = self._varint(data, position)
                yield number, value
                continue
            if kind == _OCTETS:
                length, position = self._varint(data, position)
            elif kind in _FIXED_BYTES:
                length = _FIXED_BYTES[kind]
            else:
                raise self._wrong(f"field {number} at byte {position} has the unknown kind {kind}")
            if length > end - position:
                raise self._wrong(f"field {number} has {length} bytes, but only {end - position} are left (truncated?)")
            yield number, data[position : position + length]
            position += length

    def _varint(self, data: bytes, position: int) -> tuple[int, int]:
        """Return the number at `position`, 7 bits in each byte, and the position behind it."""
        if position < len(data) and data[position] < 0x80:
            return data[position], position + 1
        value = 0
        for i, byte in enumerate(data[position : position + _MAX_VARINT_BYTES]):
            value |= (byte & 0x7F) << 7 * i
            if byte < 0x80 and value < 2**64:
                return value, position + i + 1
        raise self._wrong(f"the number at byte {position} is truncated or too large")

    def _wrong(self, what: str) -> TokenizerError:
        return TokenizerError(f"{self.name}: {what}")

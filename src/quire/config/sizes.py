"""Parsing and formatting of sizes in bytes."""

import re

from quire.common.errors import ConfigError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(name: str, value: int | str) -> int:
    """Return the bytes of an integer or a text such as `"64MiB"` or `"500MB"`; `name` appears in the error message."""
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f'{name}={value!r}: must be a number of bytes, or text such as "64MiB" or "2GiB"')
        num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes <= 0:
        raise ConfigError(f"{name}={value!r}: must be more than 0 bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Format `num_bytes` in the largest unit that gives at least 1, such as `1.50 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"

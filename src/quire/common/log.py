"""The engine's logger: INFO and above on standard error, unless the program has configured logging itself.

The server's formats escape logged text, so that a client cannot forge a log line or a terminal control sequence.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("quire")
LIBRARIES = ("asyncio", "opentelemetry", "py.warnings")
"""Loggers of others, whose warnings a server logs in its own format."""
IN_MESSAGE = ("method", "route", "path", "status")
"""Fields of a record that are already part of its message."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
chosen_format: str | None = None
"""The format that was given to `set_up_logging`; None before it was called."""


_early: list[str] = []  # messages from before logging was configured


def log_early(message: str) -> None:
    """Log a message at INFO, as soon as logging is configured: arguments are read before that."""
    _early.append(message)
    if _is_configured():
        _log_early_messages()


def _is_configured() -> bool:
    return bool(logger.handlers or logging.getLogger().handlers)


def _log_early_messages() -> None:
    while _early:
        logger.info("%s", _early.pop(0))


def show_messages() -> None:
    """Print INFO messages, unless the program has configured logging itself."""
    if not _is_configured():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    _log_early_messages()


class TextFormatter(logging.Formatter):
    """Formats a record as text. Further lines of a message are indented, so that they cannot pass for a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", super().format(record)).replace("\n", "\n    ")
        fields = getattr(record, "fields", {}).items()
        return text + "".join(f" {name}={plain(value)}" for name, value in fields if name not in IN_MESSAGE)


def plain(value: Any) -> str:
    """The value as one word of ASCII, in quotation marks and with escapes where it has other characters."""
    text = str(value)
    return text if re.fullmatch(r"[\w./:@+-]+", text, re.ASCII) else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: time (UTC), level, message and all further fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as one line of ASCII."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _StandardError:
    """Standard error. A line that cannot be written is lost; the logging module keeps the error from the caller."""

    def write(self, text: str) -> object:
        from quire.common.faults import fault_write  # imported late, because faults imports this module

        return fault_write("log.write", sys.stderr.write, text)

    def flush(self) -> None:
        sys.stderr.flush()


def set_up_logging(log_format: str) -> None:
    """Configure a server's logging: its messages, uvicorn's errors and Python's warnings go to standard error in
    `log_format`, and so do the warnings of other libraries.

    Processes that the server starts use the same format.
    """
    global chosen_format
    chosen_format = log_format
    handler = logging.StreamHandler(_StandardError())
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else TextFormatter("%(asctime)s %(levelname)s %(message)s")
    )
    levels = {"quire": logging.INFO, "uvicorn.error": logging.ERROR} | dict.fromkeys(LIBRARIES, logging.WARNING)
    for name, level in levels.items():
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.setLevel(level)
        target.propagate = False
    logging.captureWarnings(True)
    _log_early_messages()

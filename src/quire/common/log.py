"""The logger of the engine: INFO and above to standard error, unless the program has set up logging itself.

In a server's formats nobody whose text is logged can forge a line, or a terminal's control sequence.
"""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger("quire")
IN_MESSAGE = ("method", "route", "status")
"""fields of a record that its message has already"""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")
chosen_format: str | None = None
"""what `set_up_logging` was told"""


def show_messages() -> None:
    """Print INFO messages if nobody has configured logging; a program's own set-up is left alone."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False


class TextFormatter(logging.Formatter):
    """A line each. Further lines of a message are indented, so that nobody can make one look like a message."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        text = _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", super().format(record)).replace("\n", "\n    ")
        fields = getattr(record, "fields", {}).items()
        return text + "".join(f" {name}={_plain(value)}" for name, value in fields if name not in IN_MESSAGE)


def _plain(value: Any) -> str:
    text = str(value)
    return text if re.fullmatch(r"[\w./:@+-]+", text, re.ASCII) else json.dumps(text)


class JsonFormatter(logging.Formatter):
    """An object each: time (UTC), level, message, and what else there is."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, in ASCII."""
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
    """A line that cannot be written is lost, and nobody fails for it: logging sees to that."""

    def write(self, text: str) -> object:
        from quire.common.faults import fault_write  # which logs itself

        return fault_write("log.write", sys.stderr.write, text)

    def flush(self) -> None:
        sys.stderr.flush()


def set_up_logging(log_format: str) -> None:
    """A server's: messages, and uvicorn's errors, to standard error in this format; processes that it starts do so."""
    global chosen_format
    chosen_format = log_format
    handler = logging.StreamHandler(_StandardError())
    handler.setFormatter(
        JsonFormatter() if log_format == "json" else TextFormatter("%(asctime)s %(levelname)s %(message)s")
    )
    for name, level in (("quire", logging.INFO), ("uvicorn.error", logging.ERROR)):
        target = logging.getLogger(name)
        target.handlers[:] = [handler]
        target.setLevel(level)
        target.propagate = False

"""Text of a model on a terminal."""

import re
import sys

_CONTROLS = re.compile(r"[^\t\n\x20-\x7e\xa0-\U0010ffff]")


def without_controls(text: str) -> str:
    """Replace characters that a terminal would interpret as control sequences, where standard output is a terminal."""
    return _CONTROLS.sub("?", text) if sys.stdout.isatty() else text

"""The logger of the engine: INFO and above to standard error, unless the program has set up logging itself."""

import logging

logger = logging.getLogger("quire")


def show_messages() -> None:
    """Print INFO messages if nobody has configured logging; a program's own set-up is left alone."""
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False

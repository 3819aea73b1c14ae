"""vLLM's module that makes loggers."""

from logging import Logger, getLogger


def init_logger(name: str) -> Logger:
    """Return the logger of this name. Quire's own messages go to the logger `quire`."""
    return getLogger(name)

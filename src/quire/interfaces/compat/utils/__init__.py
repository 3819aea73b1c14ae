"""vLLM's utilities that programs use."""

import uuid

from quire.common.arguments.options import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    """Return a new identifier, for example of a request."""
    return uuid.uuid4().hex

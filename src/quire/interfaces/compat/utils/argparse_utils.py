"""vLLM's module of its parser of command lines."""

from quire.common.arguments.options import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]

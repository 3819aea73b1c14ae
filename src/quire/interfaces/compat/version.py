"""vLLM's module of the version; here it is Quire's."""

from quire.common.version import __version__

__all__ = ["__version__"]

"""Where vLLM has its arguments, so that `from quire.engine.arg_utils import ...` works."""

from quire.config.args import EngineArgs

AsyncEngineArgs = EngineArgs

__all__ = ["AsyncEngineArgs", "EngineArgs"]

"""Where vLLM has its outputs, so that `from quire.outputs import ...` works."""

from quire.common.outputs import CompletionOutput, RequestMetrics, RequestOutput

__all__ = ["CompletionOutput", "RequestMetrics", "RequestOutput"]

"""vLLM's module of log-probabilities."""

from quire.common.outputs import Logprob

__all__ = ["Logprob"]

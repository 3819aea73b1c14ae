"""Who is told what happens to requests: metrics, tracing, the log."""

from typing import Protocol

from quire.common.outputs import EngineStats, RequestMetrics
from quire.common.params import BeamSearchParams, SamplingParams


class RequestListener(Protocol):
    """Called in the event loop, for every request of an AsyncLLM: must be quick, and must not raise."""

    def on_step(self, stats: EngineStats) -> None:
        """The engine has taken a step, or changed while idle."""
        ...

    def on_request_start(
        self, request_id: str, num_prompt_tokens: int, params: SamplingParams | BeamSearchParams
    ) -> None:
        """A request was found right and goes to the engine; `on_request_end` follows once."""
        ...

    def on_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """Tokens of a request have come; `now` in seconds of time.monotonic()."""
        ...

    def on_request_end(self, request_id: str, metrics: RequestMetrics, num_cached_tokens: int, reason: str) -> None:
        """The end: its times, the prompt tokens that were cached, and why no more will come: stop, length, abort or
        error."""
        ...

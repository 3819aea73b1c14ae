"""The protocol of objects that are notified of requests' events: metrics, tracing and the request log."""

from typing import Protocol

from quire.common.outputs import EngineStats, RequestMetrics
from quire.common.params import BeamSearchParams, SamplingParams


class RequestListener(Protocol):
    """Is notified, in the event loop, of every request of an AsyncLLM. Its methods must be quick and must not raise."""

    def on_step(self, stats: EngineStats) -> None:
        """The engine has finished a step, or its statistics have changed while idle."""

    def on_request_start(
        self, request_id: str, num_prompt_tokens: int, params: SamplingParams | BeamSearchParams
    ) -> None:
        """A valid request was sent to the engine; `on_request_end` follows exactly once."""

    def on_tokens(self, request_id: str, num_tokens: int, now: float) -> None:
        """Tokens of a request were received; `now` is in seconds of time.monotonic()."""

    def on_request_end(
        self, request_id: str, metrics: RequestMetrics, num_cached_tokens: int, reason: str, longest: int
    ) -> None:
        """A request has ended; `reason` is stop, length, abort or error, `longest` the number of tokens of its longest
        output."""

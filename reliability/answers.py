"""Send a request to a served model, and keep what came of its response."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass, field
from typing import Any

HUNG_S = 120.0
"""Seconds without a byte after which a client counts as hung."""


@dataclass
class Answer:
    """The response that a client got."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: list[float] = field(default_factory=list)
    error: str = ""
    """A code of the server, `broken` for the connection, or `hung`; empty if the response is complete."""
    message: str = ""
    """The server's message for the error."""
    seconds: float = 0.0
    gap_s: float = 0.0
    """The longest time between two events of a stream."""
    gap_end_s: float = 0.0
    """When it ended, by time.monotonic()."""

    def is_part_of(self, whole: Answer) -> bool:
        """Return whether `whole` begins with this response, or equals it if this response has no error."""
        if not self.error:
            return (self.texts, self.logprobs) == (whole.texts, whole.logprobs)
        texts = all(whole.texts.get(index, "").startswith(text) for index, text in self.texts.items())
        return texts and whole.logprobs[: len(self.logprobs)] == self.logprobs

    def add(self, body: dict[str, Any]) -> None:
        """Add a chunk of a stream, or a whole response."""
        if "error" in body:
            self.error, self.message = body["error"]["code"] or body["error"]["type"], body["error"]["message"]
        for choice in body.get("choices", ()):
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + choice["text"]
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", ())


def ask(port: int, body: dict[str, Any]) -> Answer:
    """Send a request and read the response."""
    answer, start_s = Answer(), time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HUNG_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.headers["content-type"].startswith("text/event-stream"):
            _read_events(response, answer)
        else:
            answer.add(json.loads(response.read()))
    except TimeoutError:
        answer.error = "hung"
    except (OSError, http.client.HTTPException):
        answer.error = "broken"
    finally:
        connection.close()
    answer.seconds = time.monotonic() - start_s
    return answer


def _read_events(response: http.client.HTTPResponse, answer: Answer) -> None:
    is_done, last_s = False, None
    for line in response:
        if line.startswith(b"data: "):
            now_s = time.monotonic()
            if last_s is not None and now_s - last_s > answer.gap_s:
                answer.gap_s, answer.gap_end_s = now_s - last_s, now_s
            last_s = now_s
            is_done = line.strip() == b"data: [DONE]"
            if not is_done:
                answer.add(json.loads(line[6:]))
    if not is_done:
        answer.error = answer.error or "broken"

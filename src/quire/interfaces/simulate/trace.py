"""Traces of requests: a file with one JSON object per line."""

import random
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from quire.common.errors import ConfigError

MAX_WIDTH = 64
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Width = Annotated[int, Meta(ge=1, le=MAX_WIDTH)]
VOCAB_SIZE = 32_000


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace, a line of its file. Ranges are checked while decoding, consistency in the constructor."""

    arrival_s: Seconds
    prompt_len: Count
    """Number of prompt tokens; in a later turn of a session, the tokens added to the conversation."""
    output_len: Count
    """Number of tokens to generate for each sample or beam."""
    prefix_group: Annotated[int, Meta(ge=0)] | None = None
    """Requests of one group begin with the same `prefix_len` tokens."""
    prefix_len: Annotated[int, Meta(ge=0)] = 0
    """Number of tokens that the prompt shares with its prefix group."""
    tenant: Annotated[str, Meta(min_length=1, max_length=64)] = "default"
    priority: Annotated[int, Meta(ge=-(10**9), le=10**9)] = 0
    """Priority for the policy `priority`; smaller numbers run first."""
    n: Width = 1
    """Number of parallel samples."""
    beam_width: Width = 1
    session: Annotated[int, Meta(ge=0)] | None = None
    """Number of the conversation. A turn is submitted `think_s` after the end of the previous turn, but not before its
    arrival."""
    think_s: Seconds = 0.0
    """Seconds between the end of the previous turn and this one."""

    def __post_init__(self) -> None:
        if self.n > 1 and self.beam_width > 1:
            raise ConfigError(f"n={self.n} and beam_width={self.beam_width}: only one of them can be more than 1")
        if (self.prefix_group is None) != (self.prefix_len == 0):
            raise ConfigError(
                f"prefix_group={self.prefix_group} and prefix_len={self.prefix_len}: give both, with a length of at "
                "least 1, or neither"
            )
        if self.prefix_len > self.prompt_len:
            raise ConfigError(f"prefix_len={self.prefix_len}: must be at most prompt_len, {self.prompt_len}")
        if self.think_s and self.session is None:
            raise ConfigError(f"think_s={self.think_s}: give a session, or leave it out")

    def prompt_token_ids(self, index: int) -> list[int]:
        """Return the prompt tokens of request number `index`: those of its prefix group, then its own."""
        if not self.prefix_len:
            return _tokens(f"prompt {index}", self.prompt_len)
        own = _tokens(f"prompt {index}", self.prompt_len - self.prefix_len)
        return [*_prefix_tokens(self.prefix_group, self.prefix_len), *own]


@lru_cache(maxsize=256)
def _prefix_tokens(group: int | None, num_tokens: int) -> list[int]:
    return _tokens(f"prefix {group}", num_tokens)


def _tokens(name: str, num_tokens: int) -> list[int]:
    """The tokens that `random.Random(name).choices(range(VOCAB_SIZE), k=num_tokens)` returns, in less time: each is
    made of 53 bits, 27 and 26 of two words."""
    words = np.frombuffer(random.Random(name).randbytes(8 * num_tokens), "<u4")
    chances = ((words[::2] >> 5) * 67108864.0 + (words[1::2] >> 6)) / 9007199254740992.0
    tokens: list[int] = (chances * float(VOCAB_SIZE)).astype(np.int64).tolist()
    return tokens


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a JSONL file, in order of arrival. Raises ConfigError that names an invalid line."""
    decoder = msgspec.json.Decoder(TraceRequest)
    sessions: set[int] = set()
    latest = 0.0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    request = decoder.decode(line)
                    _check_place(request, latest, sessions)
                except (msgspec.DecodeError, UnicodeDecodeError, ConfigError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
                latest = request.arrival_s
                yield request
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error


def _check_place(request: TraceRequest, latest: float, sessions: set[int]) -> None:
    """Check that a line is consistent with the lines before it."""
    if request.arrival_s < latest:
        raise ConfigError(f"arrival_s={request.arrival_s} is before the previous line's {latest}: sort the lines")
    if request.session is None:
        return
    if request.session in sessions and request.prefix_len:
        raise ConfigError(
            f"prefix_len={request.prefix_len}: only the first turn of session {request.session} can have a prefix"
        )
    sessions.add(request.session)

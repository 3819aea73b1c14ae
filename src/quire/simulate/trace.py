"""What arrives when: a synthetic trace from a seed, or one read from a file."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from quire.errors import ConfigError

Count = Annotated[int, Meta(ge=1, le=10_000_000)]
VOCAB_SIZE = 32_000


class TraceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace; a line of a JSONL file."""

    arrival_s: Annotated[float, Meta(ge=0)]
    prompt_len: Count
    output_len: Count
    prefix_group: Annotated[int, Meta(ge=0)] | None = None
    """requests of one group begin with the same tokens..."""
    prefix_len: Annotated[int, Meta(ge=0)] = 0
    """...this many of them"""

    def prompt_token_ids(self, index: int) -> list[int]:
        """Tokens of the prompt of request number `index`: the group's, then its own."""
        shared = min(self.prefix_len, self.prompt_len) if self.prefix_group is not None else 0
        group = [((self.prefix_group or 0) * 7919 + i * 104729) % VOCAB_SIZE for i in range(shared)]
        own = random.Random(f"prompt {index}").choices(range(VOCAB_SIZE), k=self.prompt_len - shared)
        return group + own


def synthetic_trace(seed: int, num_requests: int, *, requests_per_s: float = 5.0) -> Iterator[TraceRequest]:
    """Poisson arrivals, log-normal lengths around 160 tokens in and 60 out; half share one of 20 prefixes."""
    rng = random.Random(f"trace {seed}")
    arrival_s = 0.0
    for _ in range(num_requests):
        arrival_s += rng.expovariate(requests_per_s)
        prompt_len = 1 + int(min(rng.lognormvariate(4.8, 0.8), 1500))
        output_len = 1 + int(min(rng.lognormvariate(3.8, 0.7), 400))
        group = rng.randrange(20) if rng.random() < 0.5 else None
        yield TraceRequest(round(arrival_s, 6), prompt_len, output_len, group, 128 if group is not None else 0)


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """The requests of a JSONL file, in order of arrival. ConfigError names the line that is wrong."""
    decoder = msgspec.json.Decoder(TraceRequest)
    latest = 0.0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    request = decoder.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from error
                if request.arrival_s < latest:
                    raise ConfigError(
                        f"{path}, line {number}: arrival_s {request.arrival_s} is before {latest}; sort them"
                    )
                latest = request.arrival_s
                yield request
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error

"""The figures of a run that the report and the plot need."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.scheduling.scheduler import Scheduler
from quire.interfaces.simulate.trace import TraceRequest
from quire.kv.block_space_manager import BlockSpaceManager

MAX_MOMENTS = 4096


def _times() -> array[float]:
    return array("d")


@dataclass(frozen=True, slots=True)
class Moment:
    """The state of blocks and queues at one time."""

    time_s: float
    num_running: int
    num_waiting: int
    num_swapped: int
    num_used_blocks: int
    num_cached_blocks: int
    num_table_entries: int
    """Entries of all block tables on the device; more than `num_used_blocks` if blocks are shared."""
    num_empty_slots: int
    """Empty slots in used blocks."""
    hit_rate: float
    """Share of prompt tokens found in the prefix cache so far."""


@dataclass(slots=True)
class TenantFigures:
    """The figures of one tenant in a run."""

    num_requests: int = 0
    num_tokens: int = 0
    """Tokens of prompts and outputs of finished requests."""
    num_contended_tokens: int = 0
    """Tokens computed while at least two tenants had requests waiting for their first step."""
    first_token_s: array[float] = field(default_factory=_times)


@dataclass(slots=True)
class Record:
    """Figures collected while a trace runs."""

    first_token_s: array[float] = field(default_factory=_times)
    per_token_s: array[float] = field(default_factory=_times)
    total_s: array[float] = field(default_factory=_times)
    between_s: array[float] = field(default_factory=_times)
    """As `per_token_s`, for each of `first_token_s`; 0 where there is only one token."""
    tenants: defaultdict[str, TenantFigures] = field(default_factory=lambda: defaultdict(TenantFigures))
    moments: list[Moment] = field(default_factory=list)
    steps_per_moment: int = 1
    backlog: Counter[str] = field(default_factory=Counter)
    """By tenant, the requests that wait for their first step."""
    begun_lens: dict[int | None, int] = field(default_factory=dict)
    """By group, the length of the prefix of which computation has begun."""
    num_ignored: int = 0
    num_hit_tokens: int = 0
    num_output_tokens: int = 0
    """Of finished requests."""
    num_possible_hit_tokens: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    outputs_digest: int = 0
    """Sum of the 128-bit hashes of all outputs, modulo 2**128."""

    def finished(self, index: int, request: TraceRequest, group: SequenceGroup) -> None:
        """Record a finished request."""
        metrics = group.metrics
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        first_token_s = metrics.first_token_time - metrics.arrival_time
        self.first_token_s.append(first_token_s)
        self.total_s.append(metrics.finished_time - metrics.arrival_time)
        decode_s = metrics.finished_time - metrics.first_token_time
        self.between_s.append(decode_s / max(1, request.output_len - 1))
        if request.output_len > 1:
            self.per_token_s.append(self.between_s[-1])
        tenant = self.tenants[request.tenant]
        tenant.num_requests += 1
        num_output_tokens = sum([seq.num_output_tokens for seq in group.seqs])
        self.num_output_tokens += num_output_tokens
        tenant.num_tokens += group.seqs[0].num_prompt_tokens + num_output_tokens
        tenant.first_token_s.append(first_token_s)
        for seq in group.seqs:
            output = array("q", [index, seq.output.index, *seq.output.token_ids]).tobytes()
            own = int.from_bytes(blake2b(output, digest_size=16).digest(), "little")
            self.outputs_digest = (self.outputs_digest + own) % 2**128

    def look(self, time_s: float, scheduler: Scheduler, blocks: BlockSpaceManager) -> None:
        """Record the current state. Beyond MAX_MOMENTS, every other moment is dropped and the interval doubles."""
        if scheduler.num_steps % self.steps_per_moment:
            return
        empty: dict[int, int] = {}  # by block: forks share a partly full block until one of them writes
        for seq in (seq for group in scheduler.requests.running for seq in group.seqs_in(SequenceStatus.RUNNING)):
            num_empty = -seq.num_computed_tokens % blocks.block_size
            if num_empty:
                empty |= {int(table[-1]): num_empty for table in blocks.block_tables(seq.seq_id)}
        self.moments.append(
            Moment(
                time_s,
                num_running=len(scheduler.requests.running),
                num_waiting=scheduler.requests.num_waiting,
                num_swapped=len(scheduler.requests.swapped),
                num_used_blocks=blocks.num_used_blocks,
                num_cached_blocks=blocks.pool.num_cached_blocks,
                num_table_entries=int(np.frombuffer(blocks.pool.ref_counts, np.int64).sum()),
                num_empty_slots=sum(empty.values()),
                hit_rate=blocks.stats.hit_rate,
            )
        )
        if len(self.moments) > MAX_MOMENTS:
            del self.moments[::2]
            self.steps_per_moment *= 2

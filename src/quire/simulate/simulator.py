"""Replays a trace through the real scheduler, block manager and commit."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b

from quire.batch import Batch, Draw, StepResult
from quire.config.kv_cache import KVCacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.engine.commit import Committer
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence, SequenceGroup
from quire.kv.block_space_manager import BlockSpaceManager
from quire.params import SamplingParams
from quire.simulate.trace import VOCAB_SIZE, TraceRequest

_GREEDY = Draw(0.0, 0, 1.0, b"")
_SAMPLE_EVERY = 16
"""steps between two looks at the blocks"""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step: a start, the weights streamed or multiplied, the cache read, the blocks swapped."""

    step_s: float = 0.020
    token_s: float = 0.0008
    context_token_s: float = 2e-7
    swapped_block_s: float = 2e-5

    def seconds(self, batch: Batch) -> float:
        """How long the batch would take."""
        context = sum(s.end for s in batch.sequences)
        swapped = len(batch.swap_out) + len(batch.swap_in)
        return (
            self.step_s
            + self.token_s * max(0, batch.num_tokens - 32)
            + self.context_token_s * context
            + self.swapped_block_s * swapped
        )


class FakeModel:
    """The next token is a hash of the whole history, so that a wrong one is seen to the end of the request."""

    def __init__(self, owners: dict[int, tuple[SequenceGroup, Sequence]]) -> None:
        self._owners = owners
        self._states: dict[int, tuple[int, blake2b]] = {}

    def execute(self, batch: Batch) -> StepResult:
        """One token for each sequence that draws."""
        tokens = []
        for scheduled in batch.sequences:
            length, state = self._states.get(scheduled.seq_id, (0, None))
            if state is None or length != scheduled.start:  # new, or computed again
                history = self._owners[scheduled.seq_id][1].token_ids[: scheduled.start]
                state = blake2b(array("q", history).tobytes(), digest_size=8)
            state.update(array("q", scheduled.token_ids).tobytes())
            self._states[scheduled.seq_id] = (scheduled.end, state)
            if scheduled.draw is not None:
                tokens.append(int.from_bytes(state.digest(), "little") % VOCAB_SIZE)
        return StepResult(tuple(tokens))

    def forget(self, seq_id: int) -> None:
        """The sequence has finished."""
        self._states.pop(seq_id, None)


@dataclass(slots=True)
class Moment:
    """One look at the blocks and queues."""

    time_s: float
    num_running: int
    num_waiting: int
    num_used_blocks: int
    num_allocated_slots: int
    num_filled_slots: int


@dataclass(slots=True)
class Record:
    """What a run leaves for the report."""

    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)
    outputs_digest: int = 0
    """sum of the 128-bit hashes of all outputs"""
    num_ignored: int = 0


class Simulator:
    """One engine's worth of scheduling on a virtual clock."""

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        scheduler: SchedulerConfig,
        *,
        enable_prefix_caching: bool = True,
        cost: CostModel | None = None,
    ) -> None:
        self.now_s = 0.0
        self.cost = cost or CostModel()
        self.blocks = BlockSpaceManager(kv_cache, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(scheduler, self.blocks, clock=lambda: self.now_s)
        self.committer = Committer(
            self.scheduler, max_model_len=kv_cache.max_tokens, eos_token_ids=frozenset(), clock=lambda: self.now_s
        )
        self.owners: dict[int, tuple[SequenceGroup, Sequence]] = {}
        self.model = FakeModel(self.owners)
        self.record = Record()

    def run(self, trace: Iterable[TraceRequest]) -> Record:
        """All requests to their end."""
        arrivals = iter(enumerate(trace))
        upcoming = next(arrivals, None)
        while upcoming is not None or self.scheduler.has_unfinished:
            if not self.scheduler.has_unfinished and upcoming is not None:
                self.now_s = max(self.now_s, upcoming[1].arrival_s)
            while upcoming is not None and upcoming[1].arrival_s <= self.now_s:
                self._add(*upcoming)
                upcoming = next(arrivals, None)
            self.step()
        return self.record

    def step(self) -> None:
        """One step of the engine; the clock moves by what it costs."""
        batch = self.scheduler.schedule()
        self.now_s += self.cost.seconds(batch)
        result = self.model.execute(batch)
        for group in self.committer.commit(batch, result, self.owners):
            if group.is_finished:
                self._finish(group)
        for request_id in batch.ignored:
            self.record.num_ignored += 1
            del self.owners[int(request_id)]
        if batch.step % _SAMPLE_EVERY == 0:
            self.record.moments.append(self._look())

    def _add(self, index: int, request: TraceRequest) -> None:
        seq = Sequence(index, request.prompt_token_ids(index), 0, _GREEDY, None)
        params = SamplingParams(temperature=0, max_tokens=request.output_len, detokenize=False)
        group = SequenceGroup(str(index), None, [seq], params, request.arrival_s)
        self.owners[index] = (group, seq)
        self.scheduler.add(group)

    def _finish(self, group: SequenceGroup) -> None:
        metrics, (seq,) = group.metrics, group.seqs
        assert metrics.first_token_time is not None
        assert metrics.finished_time is not None
        self.record.first_token_s.append(metrics.first_token_time - metrics.arrival_time)
        self.record.total_s.append(metrics.finished_time - metrics.arrival_time)
        if seq.num_output_tokens > 1:
            decode_s = metrics.finished_time - metrics.first_token_time
            self.record.per_token_s.append(decode_s / (seq.num_output_tokens - 1))
        output = array("q", [seq.seq_id, *seq.token_ids[seq.num_prompt_tokens :]]).tobytes()
        own = int.from_bytes(blake2b(output, digest_size=16).digest(), "little")
        self.record.outputs_digest = (self.record.outputs_digest + own) % 2**128
        del self.owners[seq.seq_id]
        self.model.forget(seq.seq_id)

    def _look(self) -> Moment:
        seqs = [seq for group in self.scheduler.running for seq in group.seqs]
        block_size, num_groups = self.blocks.block_size, self.blocks.num_groups
        slots = [-(-seq.num_computed_tokens // block_size) * block_size * num_groups for seq in seqs]
        return Moment(
            time_s=self.now_s,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self.scheduler.swapped),
            num_used_blocks=self.blocks.num_used_blocks,
            num_allocated_slots=sum(slots),
            num_filled_slots=sum(seq.num_computed_tokens * num_groups for seq in seqs),
        )

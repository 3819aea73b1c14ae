"""Replays a trace through the real scheduler, block manager and commit, with a fake model and a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

from quire.common.batch import Batch, Draw
from quire.common.params import SamplingParams
from quire.config.kv_cache import KVCacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import Drafting
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence, SequenceGroup
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.interfaces.simulate.arrivals import Arrivals
from quire.interfaces.simulate.beams import BeamChurn, ChurningBeams
from quire.interfaces.simulate.decoding import DecodeLane
from quire.interfaces.simulate.fake_model import CostModel, FakeDrafter, FakeModel, StepCost
from quire.interfaces.simulate.record import Record
from quire.interfaces.simulate.trace import MAX_WIDTH, TraceRequest
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.prefix_cache.content_hash import HashChain

_DRAWS = tuple(Draw(0.0, 0, 1.0, b"", index) for index in range(MAX_WIDTH))
_BEAM_DRAWS = (Draw(0.0, 0, 1.0, b"", logprobs=1),) * MAX_WIDTH


@lru_cache(maxsize=4096)
def _params(n: int, max_tokens: int, priority: int, tenant: str) -> SamplingParams:
    """The parameters of requests, which share them, since checking them takes long and nothing changes them."""
    return SamplingParams(n=n, temperature=0, max_tokens=max_tokens, detokenize=False, priority=priority, tenant=tenant)


class Simulator:
    """Runs one trace through the bookkeeping of an engine on a virtual clock. It may be one of a fleet's engines, which
    share the arrivals and the record."""

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        scheduler: SchedulerConfig,
        *,
        enable_prefix_caching: bool = True,
        cost: StepCost | None = None,
        churn: BeamChurn | None = None,
        acceptance: float | None = None,
        draft_length: int = 4,
    ) -> None:
        """With an `acceptance`, up to `draft_length` tokens of a sequence are drafted in each step, and each draft is
        right with this probability if those before it are."""
        self.now_s = 0.0
        self.cost: StepCost = cost or CostModel()
        self.blocks = BlockSpaceManager(kv_cache, enable_prefix_caching=enable_prefix_caching)
        self.model = FakeModel(lambda seq_id: self._owner(seq_id)[1].token_ids)
        drafting = None
        if acceptance is not None:
            speculation = SpeculativeConfig("suffix", num_speculative_tokens=draft_length)
            drafters = [FakeDrafter(self.model, acceptance)]
            drafting = Drafting(drafters, speculation, kv_cache.max_tokens, self._clock)  # searches take no time
        self.scheduler = Scheduler(
            scheduler, self.blocks, clock=self._clock, block_copy_s=self.cost.swapped_block_s, drafting=drafting
        )
        self.requests = self.scheduler.requests
        max_len = kv_cache.max_tokens
        self.committer = Committer(self.requests, max_model_len=max_len, clock=self._clock, drafting=drafting)
        self.churn = churn or BeamChurn()
        self.record = Record()
        self.arrivals = Arrivals(())
        self.unfinished: dict[str, tuple[TraceRequest, SequenceGroup]] = {}
        """The requests that were submitted and have not ended, in order of arrival."""
        self.on_end: Callable[[str], object] = lambda request_id: None
        """Called with the id of each request that ends."""
        self._new: dict[str, int] = {}  # length of the history of each request that waits for its first step
        self.lane = DecodeLane(self.scheduler, self.committer, self.model)
        self._step: tuple[Batch | None, float] | None = None
        """The step that runs: its batch, if there are requests that are not in the lane, and its seconds."""
        self.num_step_tokens = 0
        """Number of tokens that the step computes which was begun last."""

    def _clock(self) -> float:
        return self.now_s

    def run(self, trace: Iterable[TraceRequest]) -> Record:
        """Run all requests of a trace, sorted by arrival, to their end."""
        self.arrivals = Arrivals(trace)
        while True:
            for submitted_s, index, request in self.arrivals.due(self.now_s):
                self._submit(submitted_s, index, request)
            if self.requests:
                self.step()
            elif self.arrivals.next_s is None:
                return self.record
            else:
                self.now_s = max(self.now_s, self.arrivals.next_s)

    def step(self) -> None:
        """Run one step of the engine and advance the clock by its duration."""
        self.now_s += self.begin_step()
        self.end_step()
        if not self.scheduler.num_steps % self.record.steps_per_moment:
            self.lane.catch_up()
            self.record.look(self.now_s, self.scheduler, self.blocks)

    def begin_step(self) -> float:
        """Plan the next step and return the seconds that it takes, after which the caller calls `end_step`."""
        lane = self.lane
        if lane.may_plan():
            batch = lane.plan()
        else:
            lane.leave()
            batch = self.scheduler.schedule()
        backlog = self.record.backlog
        contended = len(backlog) > 1 and sum([count > 0 for count in backlog.values()]) > 1
        if contended:
            for group in lane.groups:
                self.record.tenants[group.tenant].num_contended_tokens += 1
        if batch is not None:
            self._note(batch, contended)
        num_decodes = len(lane)
        step_s = self.cost.seconds(batch, num_decodes, lane.context)
        self._step, self.num_step_tokens = (batch, step_s), num_decodes + (0 if batch is None else batch.num_tokens)
        return step_s

    def end_step(self) -> list[SequenceGroup]:
        """End the step that has begun; returns the requests that got tokens or finished, without those that the lane
        had, which each got one."""
        assert self._step is not None, "no step has begun"
        (batch, step_s), self._step = self._step, None
        if batch is None or len(self.lane):
            self.scheduler.step_time.observe(self.num_step_tokens, step_s)
        else:
            self.scheduler.observe(batch, step_s)
        ended = self.lane.commit()
        changed = [] if batch is None else self.committer.apply(batch, self.model.execute(batch))
        for group in ended:
            self._finish(group)
        if batch is not None:
            for group in changed:
                if group.is_finished:
                    self._finish(group)
            for request_id in batch.ignored:
                self._ignore(self.unfinished[request_id][1])
            self.lane.join(changed)
        return changed

    def _submit(self, submitted_s: float, index: int, request: TraceRequest) -> None:
        history = self.arrivals.history(request)
        self.add(submitted_s, index, request, history + request.prompt_token_ids(index), len(history))

    def add(
        self,
        submitted_s: float,
        index: int,
        request: TraceRequest,
        prompt: list[int],
        history_len: int,
        *,
        chain: HashChain | None = None,
        expected: list[int] | None = None,
    ) -> None:
        """Add a new request with this prompt, whose first `history_len` tokens are an earlier conversation. `chain` has
        the prompt's hashes, if they are known, and `expected` the prompt and the tokens of its only sample, if they
        are."""
        group = self._group(submitted_s, index, request, prompt)
        self.unfinished[group.request_id] = (request, group)
        if group.params.n > self.scheduler.config.max_num_seqs:
            self._ignore(group)
            return
        self._new[group.request_id] = history_len
        self.record.backlog[request.tenant] += 1
        self.requests.add(group)
        if expected is not None and self.scheduler.drafting is None:
            self.model.expect(group.seqs[0].seq_id, expected, len(prompt))
        if chain is not None and self.blocks.prefixes is not None:
            self.blocks.prefixes.adopt(group.seqs[0].seq_id, chain)

    def take_over(self, other: Simulator, request_id: str) -> None:
        """Continue a request of an engine that has died, as an engine does: a single sample after its last token,
        several samples and beams from the prompt."""
        request, group = other.unfinished.pop(request_id)
        metrics, prompt = group.metrics, group.outputs.prompt_token_ids
        token_ids = group.seqs[0].output.token_ids if group.params.n == 1 else []
        moved = self._group(metrics.arrival_time, int(request_id), request, prompt)
        moved.resume(token_ids, metrics, group.num_cached_tokens)
        self.unfinished[request_id] = (request, moved)
        if request_id in other._new:
            self._new[request_id] = other._new[request_id]
        self.requests.add(moved)

    def may_get_several(self, request_id: str) -> bool:
        """Whether an unfinished request may get several tokens in a step: it has several sequences, or drafts."""
        return self.unfinished[request_id][1].params.n > 1 or self.scheduler.drafting is not None

    def _group(self, submitted_s: float, index: int, request: TraceRequest, prompt: list[int]) -> SequenceGroup:
        n = max(request.n, request.beam_width)
        params = _params(n, request.output_len, request.priority, request.tenant)
        search, draws = None, _DRAWS
        if request.beam_width > 1:
            search, draws = ChurningBeams(self.churn, index, request.beam_width, request.output_len), _BEAM_DRAWS
        seq = Sequence(self.requests.new_seq_id(), prompt, draws[: params.n], SampleOutput(params))
        return SequenceGroup(OutputBuilder(str(index), prompt, params, submitted_s), seq, search=search)

    def _owner(self, seq_id: int) -> tuple[SequenceGroup, Sequence]:
        owner = self.requests.owners.get(seq_id)
        assert owner is not None, f"sequence {seq_id} is scheduled but gone"
        return owner

    def _note(self, batch: Batch, contended: bool) -> None:
        """Record the tokens that each tenant gets in this step, and the requests that run for the first time."""
        for transfer in batch.transfers:
            if transfer.source_tier < transfer.target_tier:
                self.record.num_swapped_out_blocks += len(transfer.pairs)
            else:
                self.record.num_swapped_in_blocks += len(transfer.pairs)
        if not contended and not self._new:
            return
        for scheduled in batch.sequences:
            group, _ = self._owner(scheduled.seq_id)
            if contended:
                self.record.tenants[group.tenant].num_contended_tokens += len(scheduled.token_ids)
            if group.request_id in self._new:
                self._note_first(group)

    def _note_first(self, group: SequenceGroup) -> None:
        """Record how many tokens of a prompt could have been cached, and how many were found."""
        request = self.unfinished[group.request_id][0]
        self.record.backlog[request.tenant] -= 1
        known_len = self._new.pop(group.request_id) - 1  # the last token of an answer has no keys and values
        begun_len = self.record.begun_lens.get(request.prefix_group, 0)
        self.record.begun_lens[request.prefix_group] = max(begun_len, request.prefix_len)
        known_len = max(0, known_len, min(begun_len, request.prefix_len))
        num_possible = min(known_len, group.seqs[0].num_prompt_tokens - 1)
        self.record.num_possible_hit_tokens += num_possible
        self.record.num_hit_tokens += min(num_possible, group.num_cached_tokens)

    def _finish(self, group: SequenceGroup) -> None:
        request = self._end(group)
        self.record.finished(int(group.request_id), request, group)
        self.arrivals.ended(request, self.now_s, group.seqs[0].token_ids)

    def _ignore(self, group: SequenceGroup) -> None:
        """End a request that can never run to its end."""
        request = self._end(group)
        if self._new.pop(group.request_id, None) is not None:
            self.record.backlog[request.tenant] -= 1
        self.record.num_ignored += 1
        self.arrivals.ended(request, self.now_s)

    def _end(self, group: SequenceGroup) -> TraceRequest:
        for seq in group.seqs:
            self.model.forget(seq.seq_id)
        self.on_end(group.request_id)
        return self.unfinished.pop(group.request_id)[0]

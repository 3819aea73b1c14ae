"""Replays a trace through the real scheduler, block manager and commit, with a fake model and a virtual clock."""

from collections import Counter
from collections.abc import Iterable

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
from quire.interfaces.simulate.fake_model import CostModel, FakeDrafter, FakeModel
from quire.interfaces.simulate.record import Record
from quire.interfaces.simulate.trace import MAX_WIDTH, TraceRequest
from quire.kv.block_space_manager import BlockSpaceManager

_DRAWS = tuple(Draw(0.0, 0, 1.0, b"", index) for index in range(MAX_WIDTH))
_BEAM_DRAWS = (Draw(0.0, 0, 1.0, b"", logprobs=1),) * MAX_WIDTH


class Simulator:
    """Runs one trace through the bookkeeping of an engine on a virtual clock."""

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        scheduler: SchedulerConfig,
        *,
        enable_prefix_caching: bool = True,
        cost: CostModel | None = None,
        churn: BeamChurn | None = None,
        acceptance: float | None = None,
        draft_length: int = 4,
    ) -> None:
        """With an `acceptance`, up to `draft_length` tokens of a sequence are drafted in each step, and each draft is
        right with this probability if those before it are."""
        self.now_s = 0.0
        self.cost = cost or CostModel()
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
        self._requests: dict[str, tuple[TraceRequest, SequenceGroup]] = {}  # submitted, not ended
        self._new: dict[str, int] = {}  # length of the history of each request that waits for its first step
        self._backlog: Counter[str] = Counter()  # number of those requests of each tenant
        self._prefix_lens: dict[int | None, int] = {}  # length of each group's prefix of which computation has begun

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
        contended = sum(count > 0 for count in self._backlog.values()) > 1
        batch = self.scheduler.schedule()
        self._note(batch, contended)
        step_s = self.cost.seconds(batch)
        self.now_s += step_s
        self.scheduler.observe(batch, step_s)
        changed = self.committer.commit(batch, self.model.execute(batch))
        for group in changed:
            if group.is_finished:
                self._finish(group)
        for request_id in batch.ignored:
            self._ignore(self._requests[request_id][1])
        self.record.look(self.now_s, self.scheduler, self.blocks)

    def _submit(self, submitted_s: float, index: int, request: TraceRequest) -> None:
        history = self.arrivals.history(request)
        params = SamplingParams(
            n=max(request.n, request.beam_width),
            temperature=0,
            max_tokens=request.output_len,
            detokenize=False,
            priority=request.priority,
            tenant=request.tenant,
        )
        prompt = history + request.prompt_token_ids(index)
        search, draws = None, _DRAWS
        if request.beam_width > 1:
            search, draws = ChurningBeams(self.churn, index, request.beam_width, request.output_len), _BEAM_DRAWS
        seq = Sequence(self.requests.new_seq_id(), prompt, draws[: params.n], SampleOutput(params))
        group = SequenceGroup(OutputBuilder(str(index), prompt, params, submitted_s), seq, search=search)
        self._requests[group.request_id] = (request, group)
        if params.n > self.scheduler.config.max_num_seqs:
            self._ignore(group)
            return
        self._new[group.request_id] = len(history)
        self._backlog[request.tenant] += 1
        self.requests.add(group)

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
        request = self._requests[group.request_id][0]
        self._backlog[request.tenant] -= 1
        known_len = self._new.pop(group.request_id) - 1  # the last token of an answer has no keys and values
        begun_len = self._prefix_lens.get(request.prefix_group, 0)
        self._prefix_lens[request.prefix_group] = max(begun_len, request.prefix_len)
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
            self._backlog[request.tenant] -= 1
        self.record.num_ignored += 1
        self.arrivals.ended(request, self.now_s)

    def _end(self, group: SequenceGroup) -> TraceRequest:
        for seq in group.seqs:
            self.model.forget(seq.seq_id)
        return self._requests.pop(group.request_id)[0]

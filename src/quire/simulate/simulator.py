"""Replays a trace through the real scheduler, block manager and commit."""

from collections import Counter
from collections.abc import Iterable

from quire.batch import Batch, Draw
from quire.config.kv_cache import KVCacheConfig
from quire.config.scheduler import SchedulerConfig
from quire.engine.commit import Committer
from quire.engine.scheduler import Scheduler
from quire.engine.sequence import Sequence, SequenceGroup
from quire.kv.block_space_manager import BlockSpaceManager
from quire.params import SamplingParams
from quire.simulate.arrivals import Arrivals
from quire.simulate.fake_model import BeamChurn, CostModel, FakeModel
from quire.simulate.record import Record
from quire.simulate.trace import TraceRequest

_GREEDY = Draw(0.0, 0, 1.0, b"")


class Simulator:
    """One engine's worth of scheduling on a virtual clock. It runs one trace."""

    def __init__(
        self,
        kv_cache: KVCacheConfig,
        scheduler: SchedulerConfig,
        *,
        enable_prefix_caching: bool = True,
        cost: CostModel | None = None,
        churn: BeamChurn | None = None,
    ) -> None:
        self.now_s = 0.0
        self.cost = cost or CostModel()
        self.churn = churn or BeamChurn()
        self.blocks = BlockSpaceManager(kv_cache, enable_prefix_caching=enable_prefix_caching)
        self.scheduler = Scheduler(scheduler, self.blocks, clock=lambda: self.now_s)
        self.committer = Committer(
            self.scheduler, max_model_len=kv_cache.max_tokens, eos_token_ids=frozenset(), clock=lambda: self.now_s
        )
        self.model = FakeModel(lambda seq_id: self.scheduler.owner(seq_id)[1].token_ids)
        self.record = Record()
        self.arrivals = Arrivals(())
        self._requests: dict[str, TraceRequest] = {}  # submitted and not ended, by request id
        self._new: dict[str, int] = {}  # of those, what no step has taken up yet, and how long their history is
        self._backlog: Counter[str] = Counter()  # of those, how many each tenant has
        self._prefix_lens: dict[int, int] = {}  # tokens of each prefix group that somebody has computed

    def run(self, trace: Iterable[TraceRequest]) -> Record:
        """All requests of a trace, which is sorted by arrival, to their end."""
        self.arrivals = Arrivals(trace)
        while True:
            if not self.scheduler.has_unfinished:
                if self.arrivals.next_s is None:
                    return self.record
                self.now_s = max(self.now_s, self.arrivals.next_s)
            for submitted_s, index, request in self.arrivals.due(self.now_s):
                self._submit(submitted_s, index, request)
            self.step()

    def step(self) -> None:
        """One step of the engine; the clock moves by what it costs."""
        contended = sum(count > 0 for count in self._backlog.values()) > 1
        batch = self.scheduler.schedule()
        self._note(batch, contended)
        self.now_s += self.cost.seconds(batch)
        result = self.model.execute(batch)
        for group in self.committer.commit(batch, result):
            if group.is_finished:
                self._finish(group)
            else:
                self._select_beams(group)
        for request_id in batch.ignored:
            self._ignore(request_id)
        self.record.look(self.now_s, self.scheduler, self.blocks)

    def _submit(self, submitted_s: float, index: int, request: TraceRequest) -> None:
        history = self.arrivals.history(request)
        seq = Sequence(index, history + request.prompt_token_ids(index), 0, _GREEDY, None)
        params = SamplingParams(
            temperature=0,
            max_tokens=request.output_len,
            n=max(request.n, request.beam_width),
            priority=request.priority,
            detokenize=False,
        )
        group = SequenceGroup(str(index), None, [seq], params, submitted_s, tenant=request.tenant)
        self._requests[group.request_id] = request
        self._new[group.request_id] = len(history)
        self._backlog[request.tenant] += 1
        self.scheduler.add(group)

    def _note(self, batch: Batch, contended: bool) -> None:
        """Who gets tokens in this step, and who for the first time."""
        self.record.num_swapped_out_blocks += len(batch.swap_out)
        self.record.num_swapped_in_blocks += len(batch.swap_in)
        if not contended and not self._new:
            return
        computed_from_now = {}
        for scheduled in batch.sequences:
            group, seq = self.scheduler.owner(scheduled.seq_id)
            request = self._requests[group.request_id]
            if contended:
                self.record.tenants[request.tenant].num_contended_tokens += len(scheduled.token_ids)
            history_len = self._new.pop(group.request_id, None)
            if history_len is None:
                continue
            self._backlog[request.tenant] -= 1
            common_len = history_len - 1  # of an answer's last token there are no keys and values
            if request.prefix_group is not None:
                common_len = min(request.prefix_len, self._prefix_lens.get(request.prefix_group, 0))
                computed_from_now[request.prefix_group] = request.prefix_len
            possible = max(0, min(common_len, seq.num_prompt_tokens - 1))
            self.record.num_possible_hit_tokens += possible
            self.record.num_hit_tokens += min(possible, group.num_cached_tokens)
        for prefix_group, prefix_len in computed_from_now.items():
            self._prefix_lens[prefix_group] = max(prefix_len, self._prefix_lens.get(prefix_group, 0))

    def _select_beams(self, group: SequenceGroup) -> None:
        """Let some beams die, and others go on in their place."""
        request = self._requests[group.request_id]
        if request.beam_width == 1:
            return
        beams = group.seqs
        for loser, parent in self.churn.replacements(
            int(group.request_id), beams[0].num_output_tokens, request.beam_width
        ):
            token_id = self.churn.token_id(beams[parent].token_ids[-1], loser)
            self.committer.replace_beam(group, beams[loser], beams[parent], token_id)
            self.model.forget(beams[loser].seq_id)

    def _finish(self, group: SequenceGroup) -> None:
        request = self._requests.pop(group.request_id)
        self.record.finished(int(group.request_id), request, group)
        for seq in group.seqs:
            self.model.forget(seq.seq_id)
        self.arrivals.ended(request, self.now_s, group.seqs[0].token_ids)

    def _ignore(self, request_id: str) -> None:
        request = self._requests.pop(request_id)
        if self._new.pop(request_id, None) is not None:
            self._backlog[request.tenant] -= 1
        self.record.num_ignored += 1
        self.arrivals.ended(request, self.now_s)

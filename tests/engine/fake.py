"""A fake model behind the executor: the next token is a hash of the whole history, read through the blocks."""

from collections import deque
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from pathlib import Path

import numpy as np

from quire.common.batch import Batch, Draw, PoolSpec, ScheduledSequence, StepResult, TokenLogprobs
from quire.common.errors import CheckpointError
from quire.common.lora import KnownAdapter
from quire.common.params import SamplingParams
from quire.config.kv_cache import KVCacheConfig, KVCacheGroup, attention_spec
from quire.config.lora import LoRAConfig
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import SpeculativeConfig
from quire.engine.drafting.drafting import Drafting
from quire.engine.drafting.lookup import Draft
from quire.engine.requests.logprobs import LogprobRows, PromptScores
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.pooling import PromptPooling
from quire.engine.requests.sequence import Sequence, SequenceGroup
from quire.engine.scheduling.loaded_adapters import LoadedAdapters
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.kv.block_space_manager import BlockSpaceManager
from quire.kv.prefix_cache.content_hash import NO_KEY, ContentKey

VOCAB_SIZE = 50


def state_after(previous: int, token_id: int) -> int:
    """What the fake model keeps of a token: like real keys and values it depends on all tokens before it."""
    return int.from_bytes(blake2b(np.array([previous, token_id], np.int64).tobytes(), digest_size=7).digest(), "little")


def salt_of(digest: str) -> int:
    """What an adapter with this digest changes in every state."""
    return int.from_bytes(blake2b(digest.encode(), digest_size=7).digest(), "little")


def next_token(states: list[int], windows: SequenceOf[int | None] = (None,), sample: int = 0) -> int:
    """What the fake model answers to a history, as far as each group's window shows it."""
    seen = [state for window in windows for state in (states if window is None else states[-window:])]
    return blake2b(np.array([sample, *seen], np.int64).tobytes(), digest_size=4).digest()[0] % VOCAB_SIZE


def token_logprobs(states: list[int], token_id: int, num_top: int) -> TokenLogprobs:
    """How likely the fake model finds a token after a history: one row."""
    seed = blake2b(np.array(states, np.int64).tobytes(), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(seed, "little")).normal(size=VOCAB_SIZE)
    logprobs = logits - np.log(np.exp(logits).sum())
    order = np.argsort(-logprobs)
    token_ids = np.array([token_id, *order[:num_top]], np.int32)
    rank = np.array([1 + order.tolist().index(token_id)], np.int32)
    return TokenLogprobs(token_ids[None], logprobs[token_ids].astype(np.float32)[None], rank)


def joined(rows: list[TokenLogprobs]) -> TokenLogprobs:
    """Rows of several tokens as the executor brings them: in one."""
    return TokenLogprobs(
        np.concatenate([row.token_ids for row in rows]),
        np.concatenate([row.logprobs for row in rows]),
        np.concatenate([row.ranks for row in rows]),
    )


def visible(groups: SequenceOf[list[int]], windows: SequenceOf[int | None], num_tokens: int) -> list[int]:
    """What of the first tokens' states each group's window shows."""
    return [
        state
        for states, window in zip(groups, windows, strict=True)
        for state in states[0 if window is None else max(0, num_tokens - window) : num_tokens]
    ]


class FakeExecutor:
    """Keeps each token's state in its slot, in every group: a wrong table or a lost copy changes the answer."""

    pooler = None

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.windows = [getattr(group.spec, "sliding_window", None) for group in config.groups]
        self.slots = np.full((len(config.groups), config.num_blocks, config.block_size), -1)
        self.host_slots = np.full((len(config.groups), config.num_host_blocks, config.block_size), -1)
        self.fail_next = False
        self.batches: list[Batch] = []
        self.adapters: dict[int, str] = {}
        """The digests of the adapters in slots."""
        self.loads: list[str] = []
        """The digests that were loaded, in order."""
        self.lost: set[str] = set()
        """Digests of adapters that cannot be loaded."""

    def load_adapter(self, slot: int, folder: Path, digest: str) -> None:
        assert slot not in self.adapters, "an adapter is loaded over another"
        if digest in self.lost:
            raise CheckpointError(f"{folder} is gone")
        self.adapters[slot] = digest
        self.loads.append(digest)

    def unload_adapter(self, slot: int) -> None:
        del self.adapters[slot]

    def execute(self, batch: Batch) -> StepResult:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("planted failure")
        self.batches.append(batch)
        self._move_blocks(batch)
        tokens: list[int] = []
        logprobs, scored = {}, {}
        for place, scheduled in enumerate(batch.sequences):
            groups = [
                self._write(slots, scheduled, table)
                for slots, table in zip(self.slots, scheduled.block_tables, strict=True)
            ]
            seen = [
                states if window is None else states[-window:]
                for states, window in zip(groups, self.windows, strict=True)
            ]
            assert all(states == seen[0][-len(states) :] for states in seen if len(states) <= len(seen[0]))
            drawn = scheduled.drawn
            for num_tokens in range(scheduled.end - drawn.num_rows + 1, scheduled.end + 1) if drawn else ():
                flat = visible(groups, self.windows, num_tokens)
                for draw in drawn.draws:
                    token_id = next_token(flat, (None,), draw.index)
                    if draw.logprobs is not None:
                        logprobs[len(tokens)] = token_logprobs(flat, token_id, draw.logprobs)
                    tokens.append(token_id)
            if scheduled.scored is not None:
                scored[place] = self._score(scheduled, groups)
        return StepResult(tuple(tokens), logprobs, scored)

    def _score(self, scheduled: ScheduledSequence, groups: list[list[int]]) -> TokenLogprobs:
        """From rows that are computed in this step alone: nothing else is at hand."""
        wanted = scheduled.scored
        assert 0 <= wanted.row <= wanted.row + len(wanted.token_ids) <= len(scheduled.token_ids)
        return joined(
            [
                token_logprobs(visible(groups, self.windows, scheduled.start + row + 1), token_id, wanted.num_top)
                for row, token_id in enumerate(wanted.token_ids, start=wanted.row)
            ]
        )

    def _move_blocks(self, batch: Batch) -> None:
        tiers = self.slots, self.host_slots
        for transfer in batch.transfers:
            for source, target in transfer.pairs:
                tiers[transfer.target_tier][:, target] = tiers[transfer.source_tier][:, source]
        for copy in batch.copies:
            slots = self.slots[copy.group]
            slots[copy.dst_block, : copy.num_slots] = slots[copy.src_block, : copy.num_slots]

    def _write(self, slots: np.ndarray, scheduled: ScheduledSequence, table: np.ndarray) -> list[int]:
        """Compute the states of the scheduled tokens from the one before them; returns all states of the sequence."""
        positions = np.arange(scheduled.end)
        blocks, offsets = table[positions // self.config.block_size], positions % self.config.block_size
        state = int(slots[blocks[scheduled.start - 1], offsets[scheduled.start - 1]]) if scheduled.start else 0
        salt = 0 if scheduled.adapter < 0 else salt_of(self.adapters[scheduled.adapter])
        for position, token_id in enumerate(scheduled.token_ids, start=scheduled.start):
            state = state_after(state ^ salt, token_id)
            slots[blocks[position], offsets[position]] = state
        return slots[blocks, offsets].tolist()


class FunctionDrafter:
    """Proposes what a function of request and sequence returns."""

    name = "function"

    def __init__(self, draft: Callable[[SequenceGroup, Sequence], SequenceOf[int]]) -> None:
        self.draft = draft

    def propose(self, group: SequenceGroup, seq: Sequence, most: int) -> Draft:
        token_ids = tuple(self.draft(group, seq)[:most])
        return Draft(token_ids, (1.0,) * len(token_ids))

    def finish(self, group: SequenceGroup, seq: Sequence) -> None: ...


def drafting_by(draft: Callable[[SequenceGroup, Sequence], SequenceOf[int]], max_model_len: int) -> Drafting:
    """Verifies all drafts of a function, whatever they cost."""
    config = SpeculativeConfig(num_speculative_tokens=32, is_adaptive=False)
    return Drafting([FunctionDrafter(draft)], config, max_model_len)


class Harness:
    """The real scheduler, block manager and commit around the fake model; integrity checked after every step."""

    def __init__(
        self,
        *,
        num_blocks: int = 6,
        block_size: int = 4,
        num_groups: int = 1,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        caching: bool = True,
        eos: frozenset[int] = frozenset(),
        watermark: float = 0.01,
        num_host_blocks: int = 0,
        preemption_mode: str | None = None,
        failing_steps: Collection[int] = (),
        windows: SequenceOf[int | None] | None = None,
        pinned_fraction: float = 0.5,
        preempt_turns: int = 0,
        draft: Callable[[SequenceGroup, Sequence], SequenceOf[int]] | None = None,
        depth: int = 1,
        max_loras: int = 0,
        lora_bytes: int | None = None,
        **scheduling: object,
    ) -> None:
        self.windows = tuple(windows or (None,) * num_groups)
        groups = tuple(KVCacheGroup((i,), attention_spec(1, 2, "float32", w)) for i, w in enumerate(self.windows))
        config = KVCacheConfig(block_size, num_blocks, groups, num_host_blocks, max_num_batched_tokens)
        self.executor = FakeExecutor(config)
        self.blocks = BlockSpaceManager(
            config, enable_prefix_caching=caching, watermark=watermark, pinned_fraction=pinned_fraction
        )
        settings = SchedulerConfig(max_num_seqs, max_num_batched_tokens, preemption_mode, **scheduling)
        self.adapters = LoadedAdapters(LoRAConfig(max_loras, 16, lora_bytes) if max_loras else None, self.executor)
        drafting = None if draft is None else drafting_by(draft, config.max_tokens)
        self.scheduler = Scheduler(
            settings,
            self.blocks,
            clock=lambda: float(self.scheduler.num_steps),
            adapters=self.adapters,
            drafting=drafting,
        )
        self.requests = self.scheduler.requests
        self.committer = Committer(self.requests, max_model_len=config.max_tokens, drafting=drafting)
        self.depth = depth
        self.in_flight: deque[tuple[Batch, StepResult]] = deque()
        self.eos_token_ids = eos
        self.failing_steps = failing_steps
        self.preempt_turns = preempt_turns
        self.groups: list[SequenceGroup] = []
        self._users: list[SequenceGroup] = []

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        key: ContentKey = NO_KEY,
        adapter: KnownAdapter | None = None,
        **params: object,
    ) -> SequenceGroup:
        settings = SamplingParams(**{"temperature": 0, "max_tokens": max_tokens, "detokenize": False} | params)
        wanted = 0 if settings.ranks_samples and settings.logprobs is None else settings.logprobs
        draws = tuple(Draw(0.0, 0, 1.0, b"", index, logprobs=wanted) for index in range(settings.num_samples))
        rows = None if wanted is None else LogprobRows(None, keeps=settings.logprobs is not None)
        scores = None
        if settings.prompt_logprobs is not None:
            scores = PromptScores(1, prompt[1:], settings.prompt_logprobs, None)
        output = SampleOutput(settings, self.eos_token_ids, None, rows)
        seq = Sequence(self.requests.new_seq_id(), prompt, draws, output, scores)
        return self._add(seq, prompt, settings, key, adapter)

    def add_scored(self, context: list[int], continuation: list[int], key: ContentKey = NO_KEY) -> SequenceGroup:
        """A request that generates nothing."""
        scores = PromptScores(len(context), continuation, 0, None)
        settings, whole = SamplingParams(detokenize=False), context + continuation
        seq = Sequence(self.requests.new_seq_id(), whole[:-1], (), SampleOutput(settings), scores)
        return self._add(seq, whole, settings, key)

    def add_pooled(self, prompt: list[int], *, is_whole: bool = False) -> SequenceGroup:
        """A request for a vector, which the executor does not make."""
        settings, pooling = (
            SamplingParams(detokenize=False),
            PromptPooling(PoolSpec("embed"), len(prompt), is_whole=is_whole),
        )
        seq = Sequence(self.requests.new_seq_id(), prompt, (), SampleOutput(settings), pooling=pooling)
        return self._add(seq, prompt, settings, NO_KEY)

    def _add(
        self,
        seq: Sequence,
        prompt: list[int],
        settings: SamplingParams,
        key: ContentKey,
        adapter: KnownAdapter | None = None,
    ) -> SequenceGroup:
        arrival_time = float(self.scheduler.num_steps)
        outputs = OutputBuilder(str(len(self.groups)), prompt, settings, arrival_time, scores=seq.scores)
        group = SequenceGroup(outputs, seq, key, adapter=adapter)
        self.groups.append(group)
        self.adapters.use(group)
        self._users.append(group)
        self.requests.add(group)
        return group

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        assert batch.num_tokens <= self.scheduler.config.max_num_batched_tokens
        assert len(batch.sequences) <= self.scheduler.config.max_num_seqs
        try:
            self.in_flight.append((batch, self.executor.execute(batch)))
        except RuntimeError:
            self.requests.revert(batch.step)
            raise
        while len(self.in_flight) >= self.depth or (self.in_flight and not batch.sequences):
            self.committer.commit(*self.in_flight.popleft())
        self.release_ended()
        self.requests.check_integrity()
        return batch

    def release_ended(self) -> None:
        """As the engine does once a request has been returned."""
        for group in [group for group in self._users if group.is_finished]:
            self._users.remove(group)
            self.adapters.release(group)
        self.adapters.check_integrity()

    def run(self) -> None:
        """Until every request has finished; nothing may be held afterwards."""
        for turn in range(10_000):
            if not self.requests:
                break
            idle = [group for group in self.requests.running if group not in self.requests.busy()]
            if turn < self.preempt_turns and idle:
                self.scheduler.preemptor.preempt(idle[turn % len(idle)])
            self.executor.fail_next = self.scheduler.num_steps in self.failing_steps
            try:
                self.step()
            except RuntimeError:
                self.blocks.check_integrity()
        assert not self.requests, "livelock"
        assert self.blocks.num_used_blocks == 0
        assert self.blocks.tiers.pools[1].num_free_blocks == self.blocks.config.num_host_blocks

    @staticmethod
    def output(group: SequenceGroup, sample: int = 0) -> list[int]:
        return list(group.seqs[sample].output.token_ids)

    def check_output(self, group: SequenceGroup) -> None:
        """Every sample is what the request alone would have given."""
        prompt = group.seqs[0].token_ids[: group.seqs[0].num_prompt_tokens]
        for sample in range(group.params.n):
            expected = expected_output(prompt, group.params.max_tokens, self.windows, sample, group.adapter)
            assert self.output(group, sample) == expected


def expected_output(
    prompt: list[int],
    max_tokens: int,
    windows: SequenceOf[int | None] = (None,),
    sample: int = 0,
    adapter: KnownAdapter | None = None,
) -> list[int]:
    """The solo run, without any engine."""
    salt = 0 if adapter is None else salt_of(adapter.digest)
    states: list[int] = []
    output: list[int] = []
    for token_id in prompt:
        states.append(state_after((states[-1] if states else 0) ^ salt, token_id))
    for _ in range(max_tokens):
        output.append(next_token(states, windows, sample))
        states.append(state_after(states[-1] ^ salt, output[-1]))
    return output


def history(token_ids: list[int]) -> list[int]:
    """What the fake model keeps of these tokens."""
    states: list[int] = []
    for token_id in token_ids:
        states.append(state_after(states[-1] if states else 0, token_id))
    return states


def expected_logprobs(
    token_ids: list[int], first: int, num_top: int = 0, windows: SequenceOf[int | None] = (None,)
) -> list[TokenLogprobs]:
    """How likely the fake model finds each token from `first` on after all before it, without any engine."""
    groups = [history(token_ids)] * len(windows)
    return [
        token_logprobs(visible(groups, windows, position), token_ids[position], num_top)
        for position in range(first, len(token_ids))
    ]

"""Beam search by its definition, over all tokens and without any engine; and the harness that runs the real one."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from hashlib import blake2b
from types import SimpleNamespace

import numpy as np

from quire.common.batch import Batch, Draw, StepResult, TokenLogprobs
from quire.common.params import BeamSearchParams
from quire.engine.requests.beam_search import BeamSearch
from quire.engine.requests.output import OutputBuilder, SampleOutput
from quire.engine.requests.sequence import Sequence, SequenceGroup

from .fake import VOCAB_SIZE, FakeExecutor, Harness, state_after

Finished = tuple[list[int], float, str]
"""output tokens, the sum of their log-probabilities, finish reason"""


def fake_logprobs(states: SequenceOf[int], grain: float) -> np.ndarray:
    """[vocab] float32: the fake model's, by what it sees of a history; with a grain many of them are equal."""
    seed = blake2b(np.array(states, np.int64).tobytes(), digest_size=8).digest()
    logits = np.random.default_rng(int.from_bytes(seed, "little")).normal(0, 2, VOCAB_SIZE)
    if grain:
        logits = np.round(logits / grain) * grain
        return (logits - 8).astype(np.float32)
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def plain_beam_search(
    next_logprobs: Callable[[list[int]], np.ndarray],
    params: BeamSearchParams,
    max_tokens: int,
    ends: frozenset[int],
) -> list[Finished]:
    """`next_logprobs` of the output so far. The best `beam_width` outputs, in order."""
    width, beams, finished = params.beam_width, [([], 0.0)], []

    def score(cum_logprob: float, length: int) -> float:
        return cum_logprob / length**params.length_penalty

    for length in range(1, max_tokens + 1):
        ways = [
            (-(cum_logprob + float(logprob)), place, token_id)
            for place, (output, cum_logprob) in enumerate(beams)
            for token_id, logprob in enumerate(next_logprobs(output))
        ]
        ways = sorted(ways)[: max(2, 1 + len(ends)) * width]
        following = []
        for rank, (negative, place, token_id) in enumerate(ways):
            output = [*beams[place][0], token_id]
            if token_id not in ends and length < max_tokens:
                following.append((output, -negative))
            elif rank < width:
                finished.append((output, -negative, "stop" if token_id in ends else "length"))
        finished = sorted(finished, key=lambda f: -score(f[1], len(f[0])))[:width]
        beams = following[:width]
        if not beams:
            break
        if len(finished) == width:
            hopeful = max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
            worst = score(finished[-1][1], len(finished[-1][0]))
            if params.early_stopping is True or score(beams[0][1], hopeful) <= worst:
                break
    return finished


class BeamExecutor(FakeExecutor):
    """The fake model, with the log-probabilities that a draw asks for."""

    grain = 0.0
    beam_candidates: Callable[[int], object]
    """what a sequence holds that is scheduled"""

    def execute(self, batch: Batch) -> StepResult:
        assert all(self.beam_candidates(scheduled.seq_id) is None for scheduled in batch.sequences), (
            "computed again for nothing"
        )
        self.seen: dict[int, list[int]] = {}
        result = super().execute(batch)
        logprobs, place = {}, 0
        for scheduled in batch.sequences:
            for draw in scheduled.drawn.draws if scheduled.drawn else ():
                if draw.logprobs is not None:
                    assert draw.logprobs_mode == "processed_logprobs"
                    values = fake_logprobs(self.seen[scheduled.seq_id], self.grain)
                    top = np.argsort(-values, kind="stable")[: draw.logprobs]
                    token_ids = np.concatenate([top[:1], top])[None].astype(np.int32)
                    logprobs[place] = TokenLogprobs(token_ids, values[token_ids], np.ones(1, np.int32))
                place += 1
        return StepResult(result.token_ids, logprobs)

    def _write(self, slots, scheduled, table):
        states = super()._write(slots, scheduled, table)
        window = self.windows[len(self.seen.get(scheduled.seq_id, ())) and -1]
        self.seen.setdefault(scheduled.seq_id, []).extend(states if window is None else states[-window:])
        return states


class BeamHarness(Harness):
    """Requests of both kinds; at most two groups, the first without a window."""

    def __init__(self, *, grain: float = 0.0, **options: object) -> None:
        super().__init__(**options)
        self.executor = BeamExecutor(self.executor.config)
        self.executor.grain = grain
        self.executor.beam_candidates = lambda seq_id: self.requests.owners[seq_id][1].beam_candidates
        self.committer.max_model_len = 1000

    def add_beams(self, prompt: list[int], width: int, max_tokens: int = 8, **params: object) -> SequenceGroup:
        eos, wanted = self.eos_token_ids, BeamSearchParams(width, max_tokens, detokenize=False, **params)
        model = SimpleNamespace(eos_token_ids=eos, vocab_size=VOCAB_SIZE, max_model_len=self.committer.max_model_len)
        search = BeamSearch(wanted, model, self.scheduler.config.max_num_seqs)
        settings = wanted.sampling_params()
        seq = Sequence(
            self.requests.new_seq_id(), prompt, (Draw(0.0, 0, 1.0, b""),) * settings.n, SampleOutput(settings)
        )
        search.start(seq)
        arrival_time = float(self.scheduler.num_steps)
        outputs = OutputBuilder(str(len(self.groups)), prompt, settings, arrival_time)
        group = SequenceGroup(outputs, seq, search=search)
        self.groups.append(group)
        self.requests.add(group)
        return group

    def expected_beams(self, group: SequenceGroup) -> list[Finished]:
        """What the definition finds."""
        search = group.search
        assert isinstance(search, BeamSearch)

        def next_logprobs(output: list[int]) -> np.ndarray:
            states: list[int] = []
            for token_id in group.outputs.prompt_token_ids + output:
                states.append(state_after(states[-1] if states else 0, token_id))
            seen = [state for w in self.windows for state in (states if w is None else states[-w:])]
            return fake_logprobs(seen, self.executor.grain)

        return plain_beam_search(next_logprobs, search.params, search.params.max_tokens, search.end_token_ids)

    def check_beams(self, group: SequenceGroup) -> list[Finished]:
        """All outputs are those of the definition."""
        outputs = group.search.outputs(group.seqs)
        expected = self.expected_beams(group)
        params = group.search.params
        assert [output.index for output in outputs] == list(range(params.n or params.beam_width))
        for output, (tokens, cum_logprob, reason) in zip(outputs, expected[: params.n], strict=True):
            keeps_end = reason == "length" or params.include_stop_str_in_output
            assert output.token_ids == (tokens if keeps_end else tokens[:-1])
            assert (output.finish_reason, output.text) == (reason, "")
            assert abs(output.cumulative_logprob - cum_logprob) < 1e-9
            is_stop = reason == "stop" and tokens[-1] not in group.search.eos_token_ids
            assert output.stop_reason == (tokens[-1] if is_stop else None)
        return expected

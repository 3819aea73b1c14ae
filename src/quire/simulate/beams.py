"""Stands in for beam search, for its effect on memory: which beams die at each step, and whose forks replace them."""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.engine.commit import Committer
from quire.engine.sequence import SequenceGroup, SequenceStatus
from quire.simulate.trace import VOCAB_SIZE


@dataclass(frozen=True, slots=True)
class BeamChurn:
    """Each beam dies at each step with probability `rate`; request, length and beam alone decide, not the schedule."""

    rate: float = 0.1

    def replacements(self, request: int, num_output_tokens: int, beam_width: int) -> list[tuple[int, int]]:
        """(loser, parent) by beam number, to be done one after another."""
        rng = random.Random(f"beams {request} {num_output_tokens}")
        losers = [beam for beam in range(beam_width) if rng.random() < self.rate]
        return [(loser, (loser + rng.randrange(1, beam_width)) % beam_width) for loser in losers]


@dataclass(slots=True)
class _Beams:
    group: SequenceGroup
    num_output_tokens: int = 0
    """so many each beam has drawn, and those that die at this length have been replaced"""
    held: dict[int, int] = field(default_factory=dict)
    """the next token of each beam that has drawn it, until the others have: they are compared at one length"""


class BeamSelection:
    """Takes the newest tokens of a request's beams, and gives them back, some beams replaced, once it has all.

    A beam without a newest token has nothing to compute, so the scheduler leaves it alone until then.
    """

    def __init__(self, churn: BeamChurn, committer: Committer) -> None:
        self._churn = churn
        self._committer = committer
        self._beams: dict[str, _Beams] = {}
        self._incomplete: dict[str, _Beams] = {}

    def add(self, group: SequenceGroup) -> None:
        """A request whose samples are beams."""
        self._beams[group.request_id] = _Beams(group)

    def remove(self, group: SequenceGroup) -> None:
        """The request has ended."""
        self._beams.pop(group.request_id, None)
        self._incomplete.pop(group.request_id, None)

    def advance(self, changed: Iterable[SequenceGroup]) -> None:
        """After a commit and the requests that it changed."""
        for group in changed:
            beams = self._beams.get(group.request_id)
            if beams is None or beams.num_output_tokens + 1 == group.params.max_tokens:
                continue
            for seq in group.seqs:
                if seq.num_output_tokens > beams.num_output_tokens:
                    beams.held[seq.index] = seq.token_ids.pop()
            self._incomplete[group.request_id] = beams
        for beams in list(self._incomplete.values()):
            if self._is_complete(beams):
                del self._incomplete[beams.group.request_id]
                self._select(beams)

    def _is_complete(self, beams: _Beams) -> bool:
        """Whether all beams have drawn, and none has lost its blocks since."""
        return all(
            seq.index in beams.held
            and seq.status is SequenceStatus.RUNNING
            and seq.num_computed_tokens == seq.num_tokens
            for seq in beams.group.seqs
        )

    def _select(self, beams: _Beams) -> None:
        group, seqs = beams.group, beams.group.seqs
        for seq in seqs:
            seq.token_ids.append(beams.held[seq.index])
        beams.held.clear()
        beams.num_output_tokens += 1
        for loser, parent in self._churn.replacements(int(group.request_id), beams.num_output_tokens, len(seqs)):
            token_id = (seqs[parent].token_ids[-1] + 1 + loser) % VOCAB_SIZE  # another than its parent's
            self._committer.replace_beam(group, seqs[loser], seqs[parent], token_id)

"""Stands in for beam search, for its effect on memory: which beams die at each step, and whose forks replace them."""

import random
from dataclasses import dataclass

from quire.common.outputs import CompletionOutput
from quire.engine.requests.sequence import Sequence
from quire.interfaces.simulate.trace import VOCAB_SIZE

INDEX_STEP = 7919
"""between the first tokens of a prompt's samples or beams"""


@dataclass(frozen=True, slots=True)
class BeamChurn:
    """Each beam dies at each step with probability `rate`; request, length and beam alone decide, not the schedule."""

    rate: float = 0.1

    def replacements(self, request: int, num_output_tokens: int, beam_width: int) -> list[tuple[int, int]]:
        """(loser, parent) by beam number, to be done one after another."""
        rng = random.Random(f"beams {request} {num_output_tokens}")
        losers = [beam for beam in range(beam_width) if rng.random() < self.rate]
        return [(loser, (loser + rng.randrange(1, beam_width)) % beam_width) for loser in losers]


@dataclass(frozen=True, slots=True)
class ChurningBeams:
    """The BeamSelector of one request: each beam goes on with the token it has drawn, or as another's child."""

    churn: BeamChurn
    request: int
    beam_width: int
    max_tokens: int

    def select(self, beams: list[Sequence]) -> list[tuple[int, int]]:
        """The next beams; none at the end."""
        length = beams[0].num_output_tokens + 1
        drawn = [int(beam.beam_candidates.token_ids[0, 0]) for beam in beams if beam.beam_candidates is not None]
        if length == self.max_tokens:
            for beam, token_id in zip(beams, drawn, strict=True):
                beam.extend((token_id,))
            return []
        children = list(enumerate(drawn))
        if length == 1:
            children = [(0, (drawn[0] + INDEX_STEP * index) % VOCAB_SIZE) for index in range(self.beam_width)]
        for loser, parent in self.churn.replacements(self.request, length, self.beam_width):
            place, token_id = children[parent]
            children[loser] = place, (token_id + 1 + loser) % VOCAB_SIZE  # another than its parent's
        return children

    def outputs(self, beams: list[Sequence]) -> list[CompletionOutput]:
        """As they are."""
        return [beam.output.to_completion() for beam in beams]

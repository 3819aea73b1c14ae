"""A substitute for beam search with the same effect on memory: beams end and are replaced by forks of others."""

import random
from dataclasses import dataclass

from quire.common.outputs import CompletionOutput
from quire.engine.requests.sequence import Sequence
from quire.interfaces.simulate.trace import VOCAB_SIZE

INDEX_STEP = 7919
"""Difference between the first tokens of consecutive samples or beams of a prompt."""


@dataclass(frozen=True, slots=True)
class BeamChurn:
    """Ends each beam at each step with probability `rate`. The choice depends on request, length and beam only."""

    rate: float = 0.1

    def replacements(self, request: int, num_output_tokens: int, beam_width: int) -> list[tuple[int, int]]:
        """Return (ended beam, parent of its replacement) pairs, to be applied in order."""
        rng = random.Random(f"beams {request} {num_output_tokens}")
        losers = [beam for beam in range(beam_width) if rng.random() < self.rate]
        return [(loser, (loser + rng.randrange(1, beam_width)) % beam_width) for loser in losers]


@dataclass(frozen=True, slots=True)
class ChurningBeams:
    """The BeamSelector of one request: each beam continues with its sampled token or becomes a child of another."""

    churn: BeamChurn
    request: int
    beam_width: int
    max_tokens: int

    def select(self, beams: list[Sequence]) -> list[tuple[int, int]]:
        """Return (parent, token id) of the next beams; an empty list at the end."""
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
            children[loser] = place, (token_id + 1 + loser) % VOCAB_SIZE  # differs from its parent's token
        return children

    def outputs(self, beams: list[Sequence]) -> list[CompletionOutput]:
        """Return the outputs of the beams."""
        return [beam.output.to_completion() for beam in beams]

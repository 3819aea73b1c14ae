"""Beams after a step: a part of commit. This module does not import torch."""

from quire.engine.requests.sequence import SequenceGroup, SequenceStatus
from quire.engine.scheduling.unfinished import UnfinishedRequests


def advance_beams(requests: UnfinishedRequests, group: SequenceGroup) -> None:
    """Replace a request's beams by the next ones, or finish it, once all of them hold their candidates.

    The first child of a beam continues in its place and in its blocks; the others are forks of it.
    """
    beams = group.seqs
    if group.search is None or any(beam.beam_candidates is None for beam in beams):
        return
    children = group.search.select(beams)
    if not children:
        for beam in beams:
            beam.finish(SequenceStatus.FINISHED_STOPPED)
            requests.finish(group, beam)
        return
    group.seqs, parents = [], set[int]()
    for place, _ in children:
        parent = beams[place]
        group.seqs.append(requests.fork(group, parent, parent.draws[0]) if place in parents else parent)
        parents.add(place)
    for place in sorted(set(range(len(beams))) - parents):
        requests.finish(group, beams[place])
    for beam, (_, token_id) in zip(group.seqs, children, strict=True):
        beam.extend((token_id,))
        beam.beam_candidates = None
        if beam.grammar is not None and not beam.grammar.advance(token_id):
            group.error = f"stopped after {beam.num_output_tokens} tokens: {beam.grammar.error}"
    if group.error is not None:
        for beam in group.seqs:
            beam.finish(SequenceStatus.FINISHED_LENGTH_CAPPED)
            requests.finish(group, beam)

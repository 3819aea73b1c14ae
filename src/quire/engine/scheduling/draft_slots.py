"""Slots of the cache for drafts, from what nothing else needs. This module does not import torch."""

from quire.common.batch import Ahead
from quire.engine.drafting.drafting import Drafting
from quire.engine.requests.sequence import Sequence, SequenceGroup
from quire.engine.scheduling.step_plan import StepPlan
from quire.engine.scheduling.unfinished import UnfinishedRequests
from quire.kv.block_space_manager import BlockSpaceManager


def takes_drafts(group: SequenceGroup, seq: Sequence, num_tokens: int) -> bool:
    """Whether drafts may follow the tokens that the sequence runs: if it then draws a single token, and neither beams
    nor a caller's own function choose it."""
    return (
        seq.num_computed_tokens + num_tokens == len(seq.token_ids)
        and len(seq.draws) == 1
        and group.search is None
        and not group.processors
    )


def make_slots(plan: StepPlan, blocks: BlockSpaceManager, seq: Sequence, end: int) -> bool:
    """Give a sequence slots for `end` tokens if every other one can still have a block more. Returns whether it has
    them."""
    if blocks.has_room(seq.seq_id, end):
        return True
    num_left = plan.num_seqs - 1 + blocks.watermark_blocks
    has_room = blocks.can_append(seq.seq_id, seq.num_computed_tokens, end, num_left)
    if has_room:
        blocks.append(seq.seq_id, seq.num_computed_tokens, end)
    return has_room


def look_ahead(plan: StepPlan, drafting: Drafting, requests: UnfinishedRequests) -> dict[int, Ahead]:
    """By sequence id, what a draft model does in the step; it drafts where there are slots."""
    if drafting.model is None:
        return {}
    scheduled = [
        (group, seq, num_tokens, len(plan.drafts.get(seq.seq_id, ())), takes_drafts(group, seq, num_tokens))
        for group, seq, num_tokens in plan.scheduled
    ]
    planned = drafting.ahead(scheduled)
    for group, seq, num_tokens, num_drafts, _ in scheduled:
        requests.planning_group, ahead = group, planned.get(seq.seq_id)
        if ahead is not None and ahead.num_drafts:
            end = seq.num_computed_tokens + num_tokens + num_drafts + ahead.num_drafts
            if not make_slots(plan, requests.blocks, seq, end):
                planned[seq.seq_id] = Ahead(unread=ahead.unread)
    return planned

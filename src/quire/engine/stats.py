"""EngineStats of an engine: what its parts count, at one moment."""

from quire.common.outputs import EngineStats
from quire.engine.scheduling.scheduler import Scheduler
from quire.engine.step.commit import Committer
from quire.kv.block_space_manager import BlockSpaceManager


def engine_stats(
    scheduler: Scheduler, blocks: BlockSpaceManager, committer: Committer, *, num_held: int
) -> EngineStats:
    """The statistics now. `num_held` requests wait for their grammars and are not in a queue of the scheduler."""
    requests, prefix = scheduler.requests, blocks.stats
    drafting = committer.drafting
    drafts, tenant_drafts = ({}, {}) if drafting is None else (drafting.stats, drafting.tenant_stats)
    return EngineStats(
        num_running=len(requests.running),
        num_waiting=requests.num_waiting + num_held,
        num_swapped=len(requests.swapped),
        num_blocks=blocks.pool.num_blocks,
        num_used_blocks=blocks.num_used_blocks,
        num_cached_blocks=blocks.pool.num_cached_blocks,
        num_steps=scheduler.num_steps,
        num_prompt_tokens=committer.num_prompt_tokens,
        num_generated_tokens=committer.num_generated_tokens,
        num_preemptions=scheduler.preemptor.num_preemptions,
        num_swapped_blocks=scheduler.num_swapped_blocks,
        num_prefix_queried_tokens=prefix.num_queried_tokens,
        num_prefix_hit_tokens=prefix.num_hit_tokens,
        num_pinned_blocks=blocks.pins.num_blocks,
        prefix_cache=prefix.to_dict(),
        adapters=scheduler.adapters.stats(),
        drafts={name: counts.copy() for name, counts in drafts.items() if counts.num_drafts},
        tenant_drafts={name: counts.copy() for name, counts in tenant_drafts.items()},
        drafting_errors={} if drafting is None else dict(drafting.num_errors),
    )

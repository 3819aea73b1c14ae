"""The report of a simulation."""

from collections.abc import Sequence
from typing import Any

from quire.interfaces.simulate.record import Moment, Record, TenantFigures
from quire.interfaces.simulate.simulator import Simulator

_PERCENTILES = (50, 90, 99)


def report(simulator: Simulator) -> dict[str, Any]:
    """Return throughput, latencies, hit rate, preemptions, swapping, waste and sharing, rounded.

    `kv_waste` is the share of slots in used blocks that contain no token. `sharing_savings` is the share of blocks that
    sharing saves, 1 - used blocks / block table entries (Kwon et al. 2023, PagedAttention, figure 15). Both are means
    over the record's moments. `hit_of_possible` is the share of prompt tokens known from earlier requests that were
    found in the cache. `outputs_digest` is a hash of all outputs that does not depend on their order; it changes with
    the trace, but never with the schedule.
    """
    record, blocks, preemptor = simulator.record, simulator.blocks, simulator.scheduler.preemptor
    by_swap = preemptor.num_preemptions_by_swap
    return {
        **run_figures([simulator], record, simulator.now_s, simulator.committer.num_generated_tokens),
        "prefix_tokens": blocks.stats.to_dict(),
        "possible_hit_tokens": record.num_possible_hit_tokens,
        "hit_of_possible": share(record.num_hit_tokens, record.num_possible_hit_tokens),
        "preemptions": {"recompute": preemptor.num_preemptions - by_swap, "swap": by_swap},
        "swapped_out_blocks": record.num_swapped_out_blocks,
        "swapped_in_blocks": record.num_swapped_in_blocks,
        **_memory(record.moments, blocks.block_size),
        "blocks": blocks.pool.num_blocks,
        "tenants": tenant_figures(record.tenants),
        "outputs_digest": f"{record.outputs_digest:032x}",
    }


def run_figures(
    simulators: Sequence[Simulator], record: Record, seconds: float, num_output_tokens: int
) -> dict[str, Any]:
    """Return the figures of one engine's run or of a fleet's: throughput, drafts, latencies and hit rate, rounded."""
    stats = [each.blocks.stats for each in simulators]
    return {
        "requests": len(record.total_s),
        "ignored": record.num_ignored,
        "steps": sum(each.scheduler.num_steps for each in simulators),
        "simulated_s": round(seconds, 3),
        "output_tokens": num_output_tokens,
        "output_tokens_per_s": round(num_output_tokens / max(seconds, 1e-9), 2),
        **_draft_figures(simulators),
        "first_token_s": percentiles(record.first_token_s),
        "per_token_s": percentiles(record.per_token_s),
        "total_s": percentiles(record.total_s),
        "prefix_hit_rate": share(sum(s.num_hit_tokens for s in stats), sum(s.num_queried_tokens for s in stats)),
    }


def _memory(moments: Sequence[Moment], block_size: int) -> dict[str, float]:
    used = sum(moment.num_used_blocks for moment in moments)
    savings = [1 - m.num_used_blocks / m.num_table_entries for m in moments if m.num_table_entries]
    return {
        "kv_waste": share(sum(moment.num_empty_slots for moment in moments), used * block_size),
        "sharing_savings": share(sum(savings), len(savings)),
        "peak_sharing_savings": round(max(savings, default=0.0), 4),
        "mean_blocks_used": round(used / max(1, len(moments)), 1),
    }


def _draft_figures(simulators: Sequence[Simulator]) -> dict[str, int]:
    """Return how many tokens were drafted, and how many of them were accepted."""
    every = [each.scheduler.drafting for each in simulators]
    counts = [count for drafting in every if drafting is not None for count in drafting.stats.values()]
    return {
        "drafted_tokens": sum(count.num_tokens for count in counts),
        "accepted_tokens": sum(count.num_accepted for count in counts),
    }


def tenant_figures(tenants: dict[str, TenantFigures]) -> dict[str, dict[str, Any]]:
    """Return the figures of each tenant, rounded."""
    contended = sum(tenant.num_contended_tokens for tenant in tenants.values())
    return {
        name: {
            "requests": tenant.num_requests,
            "tokens": tenant.num_tokens,
            "first_token_s": percentiles(tenant.first_token_s, (50, 99)),
            "contended_share": share(tenant.num_contended_tokens, contended),
        }
        for name, tenant in sorted(tenants.items())
    }


def share(part: float, whole: float) -> float:
    """Return a share, rounded; 0 of nothing."""
    return round(part / whole, 4) if whole else 0.0


def percentiles(values: Sequence[float], percents: Sequence[int] = _PERCENTILES, digits: int = 4) -> dict[str, float]:
    """Return percentiles by the nearest-rank method; an empty dict if there are no values."""
    ordered = sorted(values)
    return {f"p{p}": round(ordered[-(-len(ordered) * p // 100) - 1], digits) for p in percents if ordered}

"""A simulation in figures."""

from collections.abc import Sequence
from typing import Any

from quire.simulate.simulator import Simulator

_PERCENTILES = (50, 90, 99)


def report(simulator: Simulator) -> dict[str, Any]:
    """Throughput, latencies, hit rate, preemptions, swap traffic, KV waste; rounded, so that equal runs print alike.

    `kv_waste` is the share of slots in running sequences' blocks that hold no token. `outputs_digest` stands for all
    outputs and does not depend on their order: it changes with the trace, never with the schedule.
    """
    record, blocks, scheduler = simulator.record, simulator.blocks, simulator.scheduler
    allocated = sum(moment.num_allocated_slots for moment in record.moments)
    filled = sum(moment.num_filled_slots for moment in record.moments)
    used = [moment.num_used_blocks for moment in record.moments]
    return {
        "requests": len(record.total_s),
        "ignored": record.num_ignored,
        "steps": scheduler.num_steps,
        "simulated_s": round(simulator.now_s, 3),
        "output_tokens": simulator.committer.num_generated_tokens,
        "output_tokens_per_s": round(simulator.committer.num_generated_tokens / max(simulator.now_s, 1e-9), 2),
        "first_token_s": _percentiles(record.first_token_s),
        "per_token_s": _percentiles(record.per_token_s),
        "total_s": _percentiles(record.total_s),
        "prefix_hit_rate": round(blocks.stats.num_hit_tokens / max(1, blocks.stats.num_queried_tokens), 4),
        "tail_hit_tokens": blocks.stats.num_tail_hit_tokens,
        "preemptions": scheduler.num_preemptions,
        "swapped_blocks": scheduler.num_swapped_blocks,
        "kv_waste": round(1 - filled / allocated, 4) if allocated else 0.0,
        "blocks": blocks.pool.num_blocks,
        "mean_blocks_used": round(sum(used) / len(used), 1) if used else 0.0,
        "outputs_digest": f"{record.outputs_digest:032x}",
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    """Nearest-rank percentiles."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 4) for p in _PERCENTILES}

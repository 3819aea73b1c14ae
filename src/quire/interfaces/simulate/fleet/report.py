"""The report of a simulated fleet."""

from __future__ import annotations

from typing import Any

from quire.interfaces.simulate.fleet.simulator import FleetSimulator
from quire.interfaces.simulate.report import run_figures, share, tenant_figures


def fleet_report(fleet: FleetSimulator) -> dict[str, Any]:
    """Return throughput, latencies, hit rate and what each engine did, rounded.

    `busiest_to_idlest` compares the tokens computed by those of the first engines that lived to the end.
    """
    record, engines = fleet.record, [*fleet.gone, *fleet.engines.values()]
    work: list[int] = [engine.num_tokens for engine in fleet.engines.values() if engine.ready_s == 0]
    return {
        **run_figures([engine.simulator for engine in engines], record, fleet.now_s, record.num_output_tokens),
        "hit_of_possible": share(record.num_hit_tokens, record.num_possible_hit_tokens),
        "engines": len(fleet.engines),
        "engine_s": round(fleet.engine_s, 3),
        "busy": share(sum(engine.busy_s for engine in engines), fleet.engine_s),
        "deaths": fleet.num_deaths,
        "moved": fleet.num_moved,
        "busiest_to_idlest": round(max(work) / min(work), 4) if all(work) and work else None,
        "tenants": tenant_figures(record.tenants),
        "outputs_digest": f"{record.outputs_digest:032x}",
    }

"""Plots of fleets: one over time, and fleets of different sizes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quire.interfaces.simulate.fleet.search import FleetPoint, Slo
from quire.interfaces.simulate.fleet.simulator import FleetMoment
from quire.interfaces.simulate.plot import BLUE, GREY, ORANGE, RED, averaged, legend_above, over_time, saved_figure


def save_fleet_plot(moments: Sequence[FleetMoment], path: Path) -> None:
    """Plot the engines and the requests of a fleet over virtual time."""
    columns = averaged(moments, ("time_s", "num_engines", "num_unfinished", "num_running"))
    with saved_figure(path, 5) as figure:
        engines, requests = figure.subplots(2, 1, sharex=True)
        engines.plot(columns["time_s"], columns["num_engines"], color=BLUE)
        engines.set(ylabel="engines", ylim=(0, None))
        for name, color in (("unfinished", ORANGE), ("running", BLUE)):
            requests.plot(columns["time_s"], columns[f"num_{name}"], color=color, label=name)
        requests.set(ylabel="requests", ylim=(0, None), xlabel="virtual time, s")
        over_time(engines)
        over_time(requests)
        legend_above(requests)


def save_curve(points: Sequence[FleetPoint], slo: Slo, path: Path) -> None:
    """Plot latencies and the share of requests within the limits over the number of engines, a curve for each
    degree."""
    with saved_figure(path, 7) as figure:
        first, between, within = panels = figure.subplots(3, 1, sharex=True)
        for degree, color in zip(
            sorted({point.degree for point in points}), (BLUE, ORANGE, RED, GREY) * 8, strict=False
        ):
            curve = [point for point in points if point.degree == degree]
            engines = [point.engines for point in curve]
            first.plot(engines, [point.ttft_s for point in curve], "o-", color=color, label=f"degree {degree}")
            between.plot(engines, [1e3 * point.itl_s for point in curve], "o-", color=color)
            within.plot(engines, [100 * point.share for point in curve], "o-", color=color)
        for axes, limit in ((first, slo.ttft_s), (between, slo.itl_s and 1e3 * slo.itl_s)):
            if limit is not None:
                axes.axhline(limit, color=GREY, linestyle="--")
        first.set(ylabel=f"p{slo.percentile} first token, s", yscale="log")
        between.set(ylabel=f"p{slo.percentile} between tokens, ms", ylim=(0, None))
        within.set(ylabel="within limits, %", ylim=(0, 105), xlabel="engines")
        for axes in panels:
            axes.grid(visible=True)
        legend_above(first)

"""A plot of a simulation: KV cache blocks, queues and prefix hit rate over virtual time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.common.errors import ConfigError
from quire.interfaces.simulate.record import Moment

SUFFIXES = (".png", ".svg")
MAX_POINTS = 800
_COLUMNS = ("time_s", "num_used_blocks", "num_cached_blocks", "num_running", "num_waiting", "num_swapped", "hit_rate")
BLUE, PALE, ORANGE, RED, GREY = "#2b6cb0", "#bcd7f0", "#dd8a21", "#b83280", "#6b7280"
_STYLE: dict[Any, Any] = {
    "axes.edgecolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "grid.alpha": 0.25,
    "lines.linewidth": 1.5,
    "svg.hashsalt": "quire",  # with metadata that has no date, equal runs give equal bytes
}


def check_plot_path(path: Path) -> None:
    """Raise ConfigError for an unknown format, a missing folder, or if matplotlib is not installed."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"cannot plot to {path}: the name must end in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise ConfigError(f"cannot plot to {path}: there is no folder {path.parent}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("plots need matplotlib: install it with pip install 'quire[plot]'") from error


@contextmanager
def saved_figure(path: Path, height: float) -> Iterator[Any]:
    """Yield a figure to be drawn on, which is then saved as PNG or SVG: the same drawing gives the same bytes with the
    same version of matplotlib."""
    check_plot_path(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(9, height), layout="constrained")
        yield figure
        figure.align_ylabels()
        try:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        except OSError as error:
            raise ConfigError(f"cannot plot to {path}: {error.strerror}") from error


def save_plot(moments: Sequence[Moment], num_blocks: int, path: Path) -> None:
    """Plot a run."""
    columns = averaged(moments, _COLUMNS)
    with saved_figure(path, 7) as figure:
        memory, queues, hits = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 2))
        _draw_memory(memory, columns, num_blocks)
        for name, color in (("running", BLUE), ("waiting", ORANGE), ("swapped", RED)):
            queues.plot(columns["time_s"], columns[f"num_{name}"], color=color, label=name)
        queues.set(ylabel="requests", ylim=(0, None))
        hits.plot(columns["time_s"], [100 * rate for rate in columns["hit_rate"]], color=BLUE)
        hits.set(ylabel="prefix hit rate, %", ylim=(0, 100), xlabel="virtual time, s")
        for axes in (memory, queues, hits):
            over_time(axes)
        for axes in (memory, queues):
            legend_above(axes)


def over_time(axes: Any) -> None:
    """Prepare a panel over virtual time."""
    axes.grid(visible=True)
    axes.margins(x=0)
    axes.set_xlim(left=0)


def legend_above(axes: Any) -> None:
    """Draw the legend above the panel, where it covers no curve."""
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False, borderaxespad=0.2)


def _draw_memory(axes: Any, columns: dict[str, list[float]], num_blocks: int) -> None:
    used, cached = columns["num_used_blocks"], columns["num_cached_blocks"]
    axes.stackplot(
        columns["time_s"], used, cached, colors=[BLUE, PALE], labels=["in use", "cached, not in use"], linewidth=0
    )
    axes.axhline(num_blocks, color=GREY, linestyle="--", label="all blocks")
    axes.set(ylabel="KV cache blocks", ylim=(0, num_blocks * 1.05))


def averaged(moments: Sequence[Any], names: Sequence[str]) -> dict[str, list[float]]:
    """Return each field over time, averaged over runs of moments if there are more than MAX_POINTS."""
    run = -(-len(moments) // MAX_POINTS) or 1
    runs = [moments[start : start + run] for start in range(0, len(moments), run)]
    return {name: [sum(getattr(m, name) for m in run) / len(run) for run in runs] for name in names}

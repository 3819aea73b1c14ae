"""The plots of docs/performance.md, as SVG; equal rows give equal bytes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

Row = Mapping[str, Any]

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, which is small and readable in any font
    "svg.hashsalt": "quire",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "axes.axisbelow": True,
}
_COLORS = ("#1b6ca8", "#e07b39", "#6a994e", "#8e6c8a", "#b5a642")
_SIZE = (7.5, 3.6)
_WIDTH = 0.8
"""Width of a group of bars, as a share of its space."""


def plot_throughput(rows: Sequence[Row], out: Path) -> None:
    """Plot output tokens per second as bars, grouped by batch size and precision, with a line at the limit."""
    measured = [row for row in rows if row.get("input_len") == 128]
    groups = list(dict.fromkeys((row["precision"], row["num_prompts"]) for row in measured))
    engines = list(dict.fromkeys(row["engine"] for row in measured))
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        width = _WIDTH / max(1, len(engines))
        for index, engine in enumerate(engines):
            its_rows = [row for row in measured if row["engine"] == engine]
            places = [groups.index((row["precision"], row["num_prompts"])) + index * width for row in its_rows]
            heights = [row["output_tokens_per_s"] for row in its_rows]
            axes.bar(places, heights, width * 0.9, color=_COLORS[index % len(_COLORS)], label=engine)
        for place, group in enumerate(groups):
            row = next(row for row in measured if (row["precision"], row["num_prompts"]) == group)
            limit = row["num_prompts"] * row["output_len"] / row["limit_s"]
            label = "limit" if place == 0 else ""
            axes.hlines(limit, place - width / 2, place + _WIDTH - width / 2, color="black", linewidth=1, label=label)
        axes.set_xticks(
            [place + (_WIDTH - width) / 2 for place in range(len(groups))],
            [f"{num_prompts}\n{precision}" for precision, num_prompts in groups],
        )
        axes.set_yscale("log")
        axes.set(xlabel="prompts of 128 in / 64 out", ylabel="output tokens per second")
        figure.legend(frameon=False, ncols=6, loc="outside upper center")
        _save(figure, out)


def plot_growth(curves: Mapping[str, Sequence[Row]], x: str, y: str, out: Path) -> None:
    """Plot cost over size on logarithmic axes, each curve with the line of linear growth from its first point.

    A size of 0 is drawn as 1.
    """
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(figsize=_SIZE, layout="constrained")
        for index, (name, curve) in enumerate(curves.items()):
            color = _COLORS[index % len(_COLORS)]
            sizes = [max(1, row[x]) for row in curve]
            axes.plot(sizes, [row[y] for row in curve], "o-", color=color, markersize=4, label=name)
            linear = [curve[0][y] * size / sizes[0] for size in sizes]
            axes.plot(sizes, linear, ":", color=color, linewidth=1, label="linear" if index == 0 else "")
        top = max(row[y] for curve in curves.values() for row in curve)
        axes.set(xscale="log", yscale="log", xlabel=x.replace("_", " "), ylabel=y.replace("_", " "))
        axes.set_ylim(top=top * 3)
        axes.legend(frameon=False)
        _save(figure, out)


def _save(figure: Any, out: Path) -> None:
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)

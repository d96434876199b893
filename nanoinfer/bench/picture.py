"""Draws what `nanoinfer bench loads` has measured: a bar for each engine and load, as a share of the load's floor."""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COLORS = ("#1f5a99", "#b3470e", "#7a7a7a", "#2f7d32")  # of engines, in their order


def draw_loads(figures: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw the figures of `benchmark`, by engine; the suffix of the path says in which format.

    Raises ImportError where matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    first = next(iter(figures.values()))
    num_loads, height = len(first["loads"]), 0.8 / len(figures)
    figure = Figure(figsize=(9, 1.2 + num_loads * (0.2 + 0.25 * len(figures))), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for rank, (engine, measured) in enumerate(figures.items()):
        for line, load in enumerate(measured["loads"]):
            speed = load["median_output_tokens_per_second"]
            share = 100 * statistics.median(run["share_of_floor"] for run in load["runs"])
            place, label = line + (rank - (len(figures) - 1) / 2) * height, engine if line == 0 else None
            axes.barh(place, share, 0.9 * height, color=COLORS[rank % len(COLORS)], label=label)
            axes.text(share + 1, place, f"{speed:,.0f}", va="center", fontsize=8)
    axes.axvline(100, color="black", linewidth=1)
    names = [f"{load['name']}, {load['load']['num_seqs']:,}" for load in first["loads"]]
    axes.set_yticks(range(num_loads), names)
    axes.set_ylabel("load, number of requests")
    axes.invert_yaxis()
    axes.set_xlim(0, 110)
    axes.set_xlabel("% of the floor, the least time that the hardware allows; beside the bars output tokens a second")
    axes.set_title(f"{first['model']} on {first['hardware'].get('gpu', 'a CPU')}")
    axes.legend(loc="lower right", bbox_to_anchor=(0.89, 0.0), frameon=False)
    figure.savefig(path)

"""The hit ratio over capacity as a PNG. Needs matplotlib: `pip install 'kvcache-server[replay]'`."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from kvcache_proto.sizes import format_size

INK, SHARED, PRIVATE, BOUND = "#333333", "#0b7285", "#e8590c", "#868e96"


def draw(found: Mapping[str, Any], title: str, path: str, sized: bool) -> None:
    """Write the chart of a replay to `path`; capacities are in blocks unless `sized`."""
    rows = found["rows"]
    capacities = [row["bytes" if sized else "blocks"] for row in rows]
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(found["unlimited"], color=BOUND, linestyle=":", linewidth=1.5)
    lines = (
        ("optimum", "offline optimum", BOUND, "--", "o"),
        ("shared", f"one cache for {found['engines']} engines", SHARED, "-", "o"),
        ("private", f"{found['engines']} private caches", PRIVATE, "-", "s"),
    )
    for key, label, colour, style, marker in lines:
        axes.plot(capacities, [row[key] for row in rows], style, color=colour, marker=marker, markersize=4, label=label)
    axes.annotate(
        f"unlimited memory: {found['unlimited']:.1%}",
        (0.01, found["unlimited"]),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        color=BOUND,
        fontsize=9,
    )
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(capacities))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticklabels([format_size(each).replace(".0 ", " ") if sized else f"{each:,}" for each in capacities])
    axes.tick_params(axis="x", rotation=30 if len(capacities) > 6 else 0)
    axes.set_ylim(0, min(1.0, found["unlimited"] * 1.15 + 0.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("host memory of all engines together" if sized else "blocks in all caches together")
    axes.set_ylabel("blocks found")
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.grid(axis="y", color="#dee2e6", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(lines), frameon=False)
    # Drawn in memory, so that no incomplete file is left, and `path` is used as given, even without a suffix.
    drawn = io.BytesIO()
    figure.savefig(drawn, format=os.path.splitext(path)[1].lstrip(".") or "png")
    with open(path, "wb") as file:
        file.write(drawn.getbuffer())

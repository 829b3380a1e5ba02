"""Plot the steps and the loss curves of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .plan import WAYS

# Way of a loss curve -> its name in the legend.
TITLES = {
    "float32": "untouched, float32", "bfloat16": "untouched, bfloat16", "fused": "fuse, bfloat16",
    "liger": 'backend="liger", bfloat16',
}  # fmt: skip


def _figure(
    plots: Path, name: str, draw: Callable[[Any], None], size: tuple[float, float]
) -> list[str]:
    """Draw a figure into a PNG, and return the lines that show it; without matplotlib say so."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return ["No plot: matplotlib is not installed.", ""]
    plots.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(plots / f"{name}.png", dpi=110)
    return [f"![{name}]({plots.name}/{name}.png)", ""]


def step_plot(
    plots: Path, stem: str, shown: Mapping[tuple[str, str], Mapping[str, Any]]
) -> list[str]:
    """Plot the time and memory of the ways, without a mask, as shares of `torch.compile`'s."""
    rows = {
        shape: ways
        for (shape, batch), ways in shown.items()
        if batch == "none" and "compile" in ways
    }
    if not rows:
        return []
    ways = [way for way in WAYS if any(way in row for row in rows.values())]

    def draw(figure: Any) -> None:
        for panel, (key, title) in zip(
            figure.subplots(2, sharex=True), (("ms", "time"), ("gib", "peak memory")), strict=True
        ):
            width = 0.8 / len(ways)
            for i, way in enumerate(ways):
                at = [(x, row) for x, row in enumerate(rows.values()) if way in row]
                heights = [row[way][key] / row["compile"][key] for _, row in at]
                panel.bar([x + i * width for x, _ in at], heights, width, label=way)
            panel.axhline(1, color="black", linewidth=0.5)
            panel.set_ylabel(f"{title}, of torch.compile's")
        panel.set_xticks(
            [x + 0.4 - width / 2 for x in range(len(rows))], rows, rotation=30, ha="right"
        )
        figure.axes[0].legend(fontsize="small", ncols=len(ways))

    return _figure(plots, f"{stem}-steps", draw, (9, 7))


def curve_plots(
    plots: Path, stem: str, drawn: Mapping[str, Mapping[str, Sequence[float]]]
) -> list[str]:
    """Plot the smoothed losses of each family, and below them their differences from float32."""
    if not drawn:
        return []

    def draw(figure: Any) -> None:
        panels = figure.subplots(2, len(drawn), sharex=True, squeeze=False, height_ratios=(2, 1))
        for column, (shape, curves) in enumerate(drawn.items()):
            above, below = panels[0][column], panels[1][column]
            for i, (way, curve) in enumerate(curves.items()):
                above.plot(curve, label=TITLES[way], linewidth=2.5 - i / 2)
                if "float32" in curves and way != "float32":
                    pairs = zip(curve, curves["float32"], strict=True)
                    apart = [abs(a - b) for a, b in pairs]
                    below.plot(apart, color=f"C{i}")
                    if any(apart):
                        below.set_yscale("log", nonpositive="mask")
            above.set_title(shape)
            below.set_xlabel("step")
        panels[0][0].set_ylabel("smoothed loss")
        panels[1][0].set_ylabel("|difference from float32|")
        panels[0][-1].legend(fontsize="small")

    return _figure(plots, f"{stem}-curves", draw, (3 * len(drawn) + 2, 6))

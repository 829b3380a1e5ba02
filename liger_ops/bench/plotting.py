"""PNG files of a run: the share of the device's rate by shape, a line for each provider."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from .points import Points
from .providers import PROVIDERS

# A provider has its colour in every plot.
COLOURS = {name: f"C{i}" for i, name in enumerate(PROVIDERS)}


def file_name(kernel: str, dtype: str) -> str:
    return f"{kernel}_{dtype}.png"


def plot(points: Points, folder: Path) -> list[Path]:
    """One file for each op and dtype, with a panel for each mode.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    rows = points.rows("share")
    for kernel, dtype in dict.fromkeys((k, d) for k, d, _, _ in rows):
        here = [(shape, mode) for k, d, shape, mode in rows if (k, d) == (kernel, dtype)]
        modes = list(dict.fromkeys(mode for _, mode in here))
        shapes = sorted({shape for shape, _ in here}, key=_size)
        size = (4 * len(modes) + 1, 4)
        figure, panels = plt.subplots(1, len(modes), figsize=size, sharey=True, squeeze=False)
        for panel, mode in zip(panels[0], modes, strict=True):
            _draw(panel, points, kernel, dtype, mode, shapes)
        panels[0][0].set_ylabel("% of the device's rate")
        panels[0][-1].legend(fontsize="small")
        figure.suptitle(f"{kernel}, {dtype}")
        figure.tight_layout()
        files.append(folder / file_name(kernel, dtype))
        figure.savefig(files[-1], dpi=100)
        plt.close(figure)
    return files


def _draw(
    panel: Any, points: Points, kernel: str, dtype: str, mode: str, shapes: list[str]
) -> None:
    for provider in points.providers():
        shares = [points.value(kernel, dtype, s, mode, provider, "share") for s in shapes]
        if any(share is not None for share in shares):
            values = [math.nan if share is None else share for share in shares]
            panel.plot(
                range(len(shapes)), values, marker="o", label=provider, color=COLOURS[provider]
            )
    panel.set_title(mode)
    panel.set_xticks(range(len(shapes)), shapes, rotation=45, ha="right", fontsize="small")
    panel.set_ylim(bottom=0)
    panel.grid(alpha=0.3)


def _size(shape: str) -> tuple[int, ...]:
    """By elements, then by width."""
    sizes = [int(size) for size in shape.split("x")]
    return (math.prod(sizes), *reversed(sizes))

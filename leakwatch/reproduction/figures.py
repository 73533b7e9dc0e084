"""Figures in the papers' own shape, as PNG for documents."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from leakwatch.notebook import needed
from leakwatch.reproduction.result import Panel

__all__ = ["draw"]

_WIDTH, _HEIGHT, _DPI = 3.4, 2.8, 110


def draw(panels: Sequence[Panel]) -> bytes:
    """Panels side by side, three in a row.

    Args:
        panels: at least one.

    Returns:
        A PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    needed("matplotlib", "a figure of an experiment")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels, strict=False):
        for name, (x, y) in panel.series.items():
            if panel.lines:
                axis.plot(x, y, marker=".", markersize=4, label=name)
            else:
                axis.scatter(x, y, s=6, alpha=0.6, label=name)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        if "x" in panel.log:
            axis.set_xscale("log")
        if "y" in panel.log:
            axis.set_yscale("log")
        axis.title.set_fontsize(9)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if 1 < len(panels[0].series) <= 12:
        axes[0].legend(fontsize=6)
    file = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()

"""Lines at a PSNR that means something to the eye, and their names.

The names stand in the legend: beside the lines they would lie under data, or, where
two levels are near, over each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from leakwatch.reporting.figures import style
from leakwatch.reporting.words import CLEARLY_ABOVE, HARDLY_BELOW, decibels

__all__ = ["Level", "levels_of_psnr", "lines_of_levels", "names_of_levels"]


class Level(NamedTuple):
    """A line across a figure.

    Attributes:
        psnr: dB.
        words: What it means.
        dash: How it is drawn.
    """

    psnr: float
    words: str
    dash: str


def levels_of_psnr(floor: float | None = None) -> list[Level]:
    """Return where pictures become recognisable, and the floor.

    Args:
        floor: PSNR (dB) of a blind guess.
    """
    levels = [
        Level(
            CLEARLY_ABOVE, f"clearly recognisable above {CLEARLY_ABOVE:g} dB", "dash"
        ),
        Level(HARDLY_BELOW, f"hardly recognisable below {HARDLY_BELOW:g} dB", "dot"),
    ]
    if floor is not None:
        levels.append(Level(floor, f"blind guess: {decibels(floor)}", "longdashdot"))
    return levels


def lines_of_levels(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """Return shapes for a layout."""
    return [
        {
            "type": "line",
            "xref": "paper",
            "x0": 0,
            "x1": 1,
            "y0": level.psnr,
            "y1": level.psnr,
            # Not under a grid line at the same level.
            "layer": "between",
            "line": _line(level),
        }
        for level in levels
    ]


def names_of_levels(levels: Sequence[Level]) -> list[dict[str, Any]]:
    """Return traces without a point: entries of the legend, last ones."""
    return [
        {
            "type": "scatter",
            "x": [None],
            "y": [None],
            "mode": "lines",
            "line": _line(level),
            "name": level.words,
            "legendrank": 2000,
            "showlegend": True,
            "hoverinfo": "skip",
        }
        for level in levels
    ]


def _line(level: Level) -> dict[str, Any]:
    return {"color": style.GREY, "width": 1.6, "dash": level.dash}

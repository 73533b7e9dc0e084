"""What all figures share: colours, layout, and a menu that switches quantities."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.extras import require
from leakwatch.reporting.ledger.table import Moment
from leakwatch.reporting.quantities import Quantity, class_label, describe

# Okabe and Ito's palette, distinct for the common colour-vision deficiencies.
BLUE: Final = "#0072B2"
ORANGE: Final = "#E69F00"
GREEN: Final = "#009E73"
VERMILION: Final = "#D55E00"
PURPLE: Final = "#CC79A7"
SKY: Final = "#56B4E9"
GREY: Final = "#7A8088"
#: Black on white; pages draw it in the colour of their text.
INK: Final = "#222222"
LINES: Final = (VERMILION, ORANGE, PURPLE, GREEN, SKY)

_LOG_FROM: Final = 100.0


def translucent(colour: str, alpha: float) -> str:
    """Return a hexadecimal colour with an opacity.

    Example:
        >>> translucent("#0072B2", 0.2)
        'rgba(0,114,178,0.2)'
    """
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


CARETS: Final = "a caret is a bound: exposure is at least that"


def markers(bounds: Iterable[bool], sign: int = 1, *, across: bool = False) -> Any:
    """Return a symbol for each point: carets point to where exposure may lie.

    Args:
        bounds: Which points are bounds.
        sign: −1 where low values are exposed.
        across: Whether values lie along the x axis.

    Returns:
        One word where no point is a bound, else a list.
    """
    marked = list(bounds)
    if not any(marked):
        return "circle"
    up, down = ("right", "left") if across else ("up", "down")
    caret = f"triangle-{down if sign < 0 else up}"
    return [caret if bound else "circle" for bound in marked]


def new_figure(title: str, subtitle: str, height: int, **layout: Any) -> Any:
    """Return an empty figure in the house style."""
    graph = require("plotly.graph_objects", "A figure")
    axis = {
        "gridcolor": "#E3E6EA",
        "linecolor": "#AAB1BA",
        "zeroline": False,
        "automargin": True,
        "ticks": "outside",
        "tickcolor": "#AAB1BA",
    }
    figure = graph.Figure()
    figure.update_layout(
        template=None,
        title={
            "text": title,
            "x": 0.0,
            "xref": "container",
            "xanchor": "left",
            "pad": {"l": 12, "t": 4},
            "font": {"size": 17},
            "subtitle": {"text": subtitle, "font": {"size": 12, "color": GREY}},
        },
        font={"family": "system-ui, -apple-system, Segoe UI, sans-serif", "size": 12},
        paper_bgcolor="#FFFFFF",
        plot_bgcolor="#FFFFFF",
        height=height,
        margin={"l": 12, "r": 12, "t": 76, "b": 12},
        hovermode="closest",
        legend={
            "orientation": "h",
            "x": 0.0,
            "y": -0.22,
            "yanchor": "top",
            "traceorder": "normal",
            "font": {"size": 11},
        },
        xaxis=axis,
        yaxis=axis,
    )
    figure.update_layout(**layout)
    return figure


def axis_title(quantity: Quantity) -> str:
    """Return name and unit, and below them which end is exposed."""
    unit = f" [{text(quantity.unit)}]" if quantity.unit else ""
    direction = f"<br><i>{text(quantity.direction)}</i>" if quantity.direction else ""
    return f"{text(quantity.name)}{unit}{direction}"


def axis_type(values: npt.NDArray[np.float64], quantity: Quantity) -> str:
    """Choose ``log`` for positive values over more than two decades."""
    finite = values[np.isfinite(values)]
    if quantity.logarithmic or finite.size == 0 or finite.min() <= 0.0:
        return "linear"
    return "log" if finite.max() > _LOG_FROM * finite.min() else "linear"


def decibel_range(values: Iterable[float]) -> list[float]:
    """Return the ends of an axis of PSNR: 10 to 40 dB, further where values are.

    So figures of several runs can be read beside each other.

    Args:
        values: In dB; what is not finite is left out.

    Example:
        >>> decibel_range([21.0, 33.0]), decibel_range([8.5, float("nan"), 51.0])
        ([10.0, 40.0], [7.5, 52.0])
    """
    finite = [float(value) for value in values if math.isfinite(value)]
    low = min([10.0, *(value - 1.0 for value in finite if value < 10.0)])
    high = max([40.0, *(value + 1.0 for value in finite if value > 40.0)])
    return [max(low, -10.0), min(high, 100.0)]


def drawable(values: Sequence[float] | npt.NDArray[np.float64]) -> list[float | None]:
    """Replace what can't be drawn (NaN, infinity) by gaps."""
    return [float(value) if np.isfinite(value) else None for value in values]


def moment_axis(moments: Sequence[Moment]) -> tuple[list[int], str]:
    """Return x positions and the axis title: steps where epochs repeat."""
    epochs = [moment.epoch for moment in moments]
    if len(set(epochs)) == len(epochs):
        return epochs, "completed epochs"
    return [moment.step for moment in moments], "optimizer steps"


def whole_ticks(x: Sequence[int]) -> dict[str, Any]:
    """Return tick settings that never show half an epoch."""
    if len(x) <= 8:
        return {"tickmode": "array", "tickvals": list(x)}
    return {"tickmode": "auto", "tickformat": "d"}


def sample_name(
    sample: int, label: int | None, class_names: Sequence[str] | None
) -> str:
    """Return ``#12 · dog``, ready for a figure."""
    if label is None:
        return f"#{sample}"
    return f"#{sample} · {short(class_label(label, class_names))}"


def text(content: str) -> str:
    """Escape text for plotly, which reads a subset of HTML in every label."""
    return html.escape(content, quote=False)


def short(content: str, longest: int = 20) -> str:
    """Cut long names and escape them."""
    if len(content) > longest:
        content = content[: longest - 1].rstrip() + "…"
    return text(content)


def band(
    x: Sequence[int],
    low: Sequence[float] | npt.NDArray[np.float64],
    high: Sequence[float] | npt.NDArray[np.float64],
    **upper: Any,
) -> list[dict[str, Any]]:
    """Return the traces of a filled band, whose edges are not drawn.

    Args:
        x: Positions.
        low: Lower edge.
        high: Upper edge.
        upper: Of the upper edge, which carries the fill; ``legendgroup`` is of both.
    """
    edge = {"type": "scatter", "x": x, "mode": "lines", "line": {"width": 0}}
    edge |= {"hoverinfo": "skip", "legendgroup": upper.pop("legendgroup", None)}
    return [
        {**edge, "y": drawable(low), "showlegend": False},
        {**edge, "y": drawable(high), "fill": "tonexty", **upper},
    ]


def note(content: str) -> dict[str, Any]:
    """Return an annotation in the middle of an empty plot."""
    return {
        "text": content,
        "xref": "paper",
        "yref": "paper",
        "x": 0.5,
        "y": 0.5,
        "showarrow": False,
        "font": {"size": 14, "color": VERMILION},
    }


def add_menu(
    figure: Any,
    groups: Mapping[str, list[Any]],
    layouts: Mapping[str, dict[str, Any]],
    quantities: Mapping[str, Quantity] | None,
) -> None:
    """Add traces by quantity, with a menu that shows one quantity at a time.

    Args:
        figure: The figure to fill; it starts with the first quantity.
        groups: Quantity to its traces.
        layouts: Quantity to the layout changes that go with it.
        quantities: Descriptions, for the menu's texts.
    """
    owners = [name for name, traces in groups.items() for _ in traces]
    first = next(iter(groups))
    for traces in groups.values():
        figure.add_traces(traces)
    for trace, owner in zip(figure.data, owners, strict=True):
        trace.visible = owner == first
    figure.update_layout(layouts[first])
    if len(groups) < 2:
        return
    buttons = [
        {
            "label": text(describe(name, quantities).name),
            "method": "update",
            "args": [{"visible": [owner == name for owner in owners]}, layouts[name]],
        }
        for name in groups
    ]
    figure.update_layout(
        updatemenus=[
            {
                "type": "dropdown",
                "buttons": buttons,
                "x": 1.0,
                "xanchor": "right",
                "y": 1.02,
                "yanchor": "bottom",
                "bgcolor": "#FFFFFF",
                "bordercolor": "#AAB1BA",
                "font": {"size": 11},
            }
        ]
    )

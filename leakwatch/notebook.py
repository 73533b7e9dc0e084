"""Results in notebooks: as a data frame, as a table, as a figure.

pandas and plotly are imported by name when somebody asks for them: the layers whose
results these are know torch only.
"""

from __future__ import annotations

import html
import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Final

__all__ = ["Tabular", "dots", "needed", "pictures"]

# Rows of a table in a notebook; the data frame has all.
_MOST_ROWS: Final = 20


def needed(module: str, purpose: str) -> Any:
    """Import a package that only some people have, or say how to get it.

    Args:
        module: Dotted name.
        purpose: What needs it; the subject of the error's sentence.

    Raises:
        ModuleNotFoundError: If it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"{purpose} needs {package}, which is not installed: pip install {package}",
            name=package,
        ) from error


class Tabular(ABC):
    """A result with rows."""

    @abstractmethod
    def records(self) -> Sequence[Mapping[str, Any]]:
        """The rows: column ↦ value, with the same columns in each."""

    def to_dataframe(self) -> Any:
        """The rows as a pandas DataFrame.

        Raises:
            ModuleNotFoundError: If pandas is not installed.
        """
        pandas = needed("pandas", f"{type(self).__name__}.to_dataframe()")
        return pandas.DataFrame(list(self.records()))

    def _repr_html_(self) -> str:
        """What a notebook shows: the short form, and the first rows as a table."""
        rows = self.records()
        head = html.escape(repr(self))
        if not rows:
            return f"<p>{head}</p>"
        names = "".join(f"<th>{html.escape(str(name))}</th>" for name in rows[0])
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(v)}</td>" for v in row.values()) + "</tr>"
            for row in rows[:_MOST_ROWS]
        )
        more = len(rows) - _MOST_ROWS
        left = f"<p>{more} more rows: to_dataframe()</p>" if more > 0 else ""
        return (
            f"<p>{head}</p><table><thead><tr>{names}</tr></thead>"
            f"<tbody>{body}</tbody></table>{left}"
        )


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "not known"
    return html.escape(f"{value:.4g}" if isinstance(value, float) else str(value))


def dots(
    values: Sequence[float], words: Sequence[str], *, title: str, axis: str
) -> Any:
    """Draw one value for each sample, largest first: a plotly figure.

    Args:
        values: NaN is a gap.
        words: of each value, shown on hovering.
        title: of the figure.
        axis: name of the values.

    Raises:
        ModuleNotFoundError: If plotly is not installed.
    """
    graph = needed("plotly.graph_objects", "plot()")
    known = [i for i, value in enumerate(values) if math.isfinite(value)]
    order = sorted(known, key=lambda i: -values[i])
    missing = len(values) - len(known)
    figure = graph.Figure(
        graph.Scatter(
            x=[str(i) for i in order],
            y=[values[i] for i in order],
            text=[words[i] for i in order],
            mode="markers",
            marker={"size": 9},
            hovertemplate="sample %{x}: %{y:.4g}<br>%{text}<extra></extra>",
        )
    )
    figure.update_layout(
        title=title + (f" ({missing} not known)" if missing else ""),
        xaxis={"title": "sample, by its place in the batch", "type": "category"},
        yaxis={"title": axis},
        template="plotly_white",
    )
    return figure


def pictures(rows: Mapping[str, Sequence[Any]], titles: Sequence[str]) -> Any:
    """Draw rows of pictures: a plotly figure.

    Args:
        rows: name ↦ uint8 arrays ``(height, width, 3)``, as many in each row.
        titles: of the columns.

    Raises:
        ModuleNotFoundError: If plotly is not installed.
    """
    graph = needed("plotly.graph_objects", "plot()")
    subplots = needed("plotly.subplots", "plot()")
    figure = subplots.make_subplots(
        rows=len(rows),
        cols=len(titles),
        column_titles=list(titles),
        row_titles=list(rows),
        horizontal_spacing=0.01,
        vertical_spacing=0.03,
    )
    for i, images in enumerate(rows.values(), 1):
        for j, image in enumerate(images, 1):
            figure.add_trace(graph.Image(z=image, hoverinfo="skip"), row=i, col=j)
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(showticklabels=False)
    figure.update_layout(
        height=60 + 140 * len(rows), margin={"l": 8, "r": 8, "t": 40, "b": 8}
    )
    return figure

"""What sections share: figures in panels, cards, cells of tables, pictures."""

from __future__ import annotations

import base64
import html
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
from PIL import Image

__all__ = [
    "Badge",
    "Card",
    "NumberCell",
    "Panel",
    "data_uri",
    "difference",
    "make_panel",
    "make_panels",
    "sort_key",
    "thumbnail",
]


@final
@dataclass(frozen=True)
class Panel:
    """A plotly figure whose title and menu are HTML, which wraps on a phone.

    Attributes:
        anchor: Id of the element that the script draws into.
        title: Of the figure.
        subtitle: Below it.
        options: Names that the menu offers; empty without one.
        height: Pixels.
        content: What the script draws: data, layout, and what each option changes.
        tall: Whether the figure scrolls by itself.
    """

    anchor: str
    title: str
    subtitle: str
    options: tuple[str, ...]
    height: int
    content: Mapping[str, Any]
    tall: bool


@final
@dataclass(frozen=True)
class Card:
    """One number with its name and a note; ``picture`` is an address."""

    name: str
    big: str
    note: str
    level: str = ""
    picture: str = ""


@final
@dataclass(frozen=True)
class Badge:
    """A word in a frame: ``bad`` for trouble, ``about`` for a gap by choice."""

    text: str
    style: str
    about: str = ""


@final
@dataclass(frozen=True)
class NumberCell:
    """A cell with a number, or with a badge where there is none.

    Attributes:
        text: The number in words.
        badge: Stands in its place.
        sort: What a sortable table compares, empty for an unknown value; None where
            the table does not sort.
        about: Shown on hovering.
        level: Of exposure, for the colour.
        note: Below the number.
    """

    text: str = ""
    badge: Badge | None = None
    sort: str | None = None
    about: str = ""
    level: str = ""
    note: str = ""


def make_panel(anchor: str, figure: Any | None, *, tall: bool = False) -> Panel | None:
    """Return a plotly figure as a panel, or None without a figure."""
    if figure is None:
        return None
    content = json.loads(figure.to_json(), parse_float=_shown)
    layout = content["layout"]
    title = layout.pop("title", {})
    menus = layout.pop("updatemenus", [])
    layout.pop("template", None)
    layout["margin"] = {"l": 8, "r": 8, "t": 10, "b": 8}
    buttons = menus[0]["buttons"] if menus else []
    # Labels are escaped for plotly; the template escapes them again, for the page.
    return Panel(
        anchor=anchor,
        title=html.unescape(title.get("text", "")),
        subtitle=html.unescape(title.get("subtitle", {}).get("text", "")),
        options=tuple(html.unescape(button["label"]) for button in buttons),
        height=int(layout.get("height", 400)),
        content={"data": content["data"], "layout": layout, "buttons": buttons},
        tall=tall,
    )


def _shown(digits: str) -> float:
    """A number with more digits than a screen shows, and not many more."""
    return float(f"{float(digits):.6g}")


def make_panels(*figures: tuple[str, Any | None]) -> tuple[Panel, ...]:
    """Return panels of anchors and figures, without those that are None."""
    panels = (make_panel(anchor, figure) for anchor, figure in figures)
    return tuple(filter(None, panels))


def sort_key(value: float) -> str:
    """Return a number as the page's script reads it.

    Example:
        >>> sort_key(1.5), sort_key(float("-inf"))
        ('1.5', '-Infinity')
    """
    return repr(value).replace("inf", "Infinity")


def thumbnail(
    pixels: npt.NDArray[np.uint8], longest: int = 96
) -> npt.NDArray[np.uint8]:
    """Shrink a picture by a whole factor to at most ``longest`` pixels a side.

    Blocks are averaged; a remainder at the right and lower edge is cut off.
    Smaller pictures come back as they are.

    Args:
        pixels: Shape (height, width, channels) with 1 or 3 channels, uint8.
        longest: Side in pixels.
    """
    factor = -(-max(pixels.shape[:2]) // longest)
    if factor <= 1:
        return pixels
    height, width = pixels.shape[:2]
    tall, wide = min(factor, height), min(factor, width)
    box = (0, 0, width - width % wide, height - height % tall)
    small = np.asarray(_image(pixels).reduce((wide, tall), box))
    return small.reshape(*small.shape[:2], pixels.shape[2])


def difference(
    rebuilt: npt.NDArray[np.uint8], original: npt.NDArray[np.uint8]
) -> npt.NDArray[np.uint8]:
    """Return the absolute difference of two pictures of one shape, uint8.

    Example:
        >>> difference(np.array([3], np.uint8), np.array([200], np.uint8)).tolist()
        [197]
    """
    apart: npt.NDArray[np.int16] = np.abs(rebuilt.astype(np.int16) - original)
    return apart.astype(np.uint8)


def data_uri(pixels: npt.NDArray[np.uint8]) -> str:
    """Return a ``data:image/png`` address that holds the picture itself.

    Args:
        pixels: Shape (height, width, channels) with 1 or 3 channels, uint8.

    Raises:
        ValueError: If the shape or the type is another.
    """
    stream = io.BytesIO()
    _image(pixels).save(stream, "png")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _image(pixels: npt.NDArray[np.uint8]) -> Image.Image:
    if (
        pixels.dtype != np.uint8
        or pixels.ndim != 3
        or pixels.shape[2] not in (1, 3)
        or 0 in pixels.shape
    ):
        raise ValueError(
            f"picture is {pixels.dtype} of shape {pixels.shape}, expected uint8 of "
            "shape (height, width, 1 or 3)"
        )
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)

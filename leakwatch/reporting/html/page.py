"""The frame of every page that leakwatch writes: one file that asks for nothing."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from leakwatch.reporting.extras import require
from leakwatch.reporting.ledger.storage import write_atomically

__all__ = ["LIBRARY", "Link", "render_page", "write_library"]

#: Name of plotly.js beside pages that share it.
LIBRARY: Final = "plotly.min.js"

_HERE: Final = Path(__file__).parent
_TEMPLATES: Final = _HERE / "templates"


class Link(NamedTuple):
    """An entry of the navigation below the heading."""

    anchor: str
    title: str


def render_page(
    template: str,
    *,
    title: str,
    heading: str,
    about: str,
    links: Sequence[Link] = (),
    folder: Path = _TEMPLATES,
    shared: bool = False,
    **content: object,
) -> str:
    """Return one HTML file with everything in it: it opens without a network.

    Args:
        template: Name of the template of the page's body.
        title: Of the window.
        heading: The first line.
        about: The line below it.
        links: To the sections.
        folder: Where the template lies; it may import the macros of the report.
        shared: Whether plotly.js lies beside the page, see `write_library`.
        content: What the template shows.

    Raises:
        ModuleNotFoundError: If plotly or Jinja2 is not installed.
    """
    library = _packed(_library())
    templates = _environment(folder)
    body: str = templates.get_template(template).render(**content)
    page: str = templates.get_template("page.html.j2").render(
        title=title,
        heading=heading,
        about=about,
        links=links,
        body=body,
        style=(_HERE / "report.css").read_text("utf-8"),
        script=(_HERE / "report.js").read_text("utf-8"),
        library=library if 'class="plot"' in body and not shared else "",
        beside=LIBRARY if shared else "",
    )
    return page


def write_library(directory: Path) -> None:
    """Put plotly.js where pages of that directory find it.

    Raises:
        ModuleNotFoundError: If plotly is not installed.
    """
    write_atomically(directory / LIBRARY, _library().encode())


def _library() -> str:
    source: str = require("plotly.offline", "The HTML report").get_plotlyjs()
    return source


@lru_cache(maxsize=1)
def _packed(source: str) -> str:
    """plotly.js for a page: 1.8 MB of text that report.js unpacks, instead of 4.8."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(source.encode()) + packer.flush()
    # "<" could begin a comment or a tag; ":" is no digit of base 85.
    digits = base64.b85encode(packed, pad=True).decode().replace("<", ":")
    return f"{len(packed)} {digits}"


@lru_cache
def _environment(folder: Path) -> Any:
    jinja2 = require("jinja2", "The HTML report")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _TEMPLATES]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment

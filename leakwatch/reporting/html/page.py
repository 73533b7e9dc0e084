"""The frame of every page that leakwatch writes: one file that asks for nothing."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from datetime import UTC, datetime
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

# plotly.js 4.1.1 with the cartesian figures only, as the npm package
# plotly.js-cartesian-dist-min ships it (MIT, see plotly-cartesian.LICENSE), packed by
# `gzip -9 -n`. All figures of a page together would not weigh a third of the whole one.
_PACKED: Final = _HERE / "plotly-cartesian.min.js.gz"


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
    live: bool = False,
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
        live: Whether the page will be written again, and reads itself again then.
        content: What the template shows.

    Raises:
        ModuleNotFoundError: If Jinja2 is not installed.
    """
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
        library=_library() if 'class="plot"' in body and not shared else "",
        beside=LIBRARY if shared else "",
        written=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}" if live else "",
    )
    return page


def write_library(directory: Path) -> None:
    """Put plotly.js, 1.5 MB, where pages of that directory find it."""
    write_atomically(directory / LIBRARY, gzip.decompress(_PACKED.read_bytes()))


@lru_cache(maxsize=1)
def _library() -> str:
    """plotly.js as text for a page: 0.7 MB, which report.js unpacks."""
    return base64.b64encode(_PACKED.read_bytes()).decode()


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

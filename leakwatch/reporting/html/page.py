"""The frame of every page that leakwatch writes: one file that asks for nothing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from leakwatch.reporting.extras import require

__all__ = ["Link", "render_page"]

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
        content: What the template shows.

    Raises:
        ModuleNotFoundError: If plotly or Jinja2 is not installed.
    """
    plotly = require("plotly.offline", "The HTML report").get_plotlyjs()
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
        # The library is 4.5 MB: leave it out where there is nothing to draw.
        library=plotly if 'class="plot"' in body else "",
    )
    return page


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

"""The frame of every page that leakwatch writes: one file that asks for nothing."""

from __future__ import annotations

from typing import Final

from leakwatch.reporting.figures.extras import require
from leakwatch.reporting.html.markup import esc
from leakwatch.reporting.html.page import SCRIPT, STYLE

__all__ = ["html_page"]

# The browser itself then refuses every request, whatever the scripts contain.
_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


def html_page(
    *, title: str, heading: str, about: str, body: str, navigation: str = ""
) -> str:
    """One HTML file with everything in it: it opens without a network.

    Args:
        title: of the window.
        heading: the first line.
        about: the line below it.
        body: HTML, escaped already.
        navigation: HTML below the two lines, escaped already.

    Raises:
        ModuleNotFoundError: plotly is not installed.
    """
    plotly = require("plotly.offline", "The HTML report").get_plotlyjs()
    # The library is 4.5 MB: leave it out where there is nothing to draw.
    library = f"<script>{plotly}</script>" if 'class="plot"' in body else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{esc(title)}</title>
<link rel="icon" href="data:,">
<style>{STYLE}</style>
</head>
<body>
<header class="top"><div>
<div class="brand">leakwatch</div>
<h1>{esc(heading)}</h1>
<div class="soft">{esc(about)}</div>
{navigation}
</div></header>
<main>
{body}
</main>
{library}
<script>{SCRIPT}</script>
</body>
</html>
"""

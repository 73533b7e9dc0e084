"""Turns the formulas of a page into MathML, which browsers draw without a script."""

from __future__ import annotations

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">(?:\\\(|\\\[)(?P<tex>.*?)(?:\\\)|\\\])'
    r"</(?P=tag)>",
    re.DOTALL,
)


def _mathml(found: re.Match[str]) -> str:
    display = "block" if found["tag"] == "div" else "inline"
    return convert(html.unescape(found["tex"]).strip(), display=display)


def on_page_content(content: str, **_: Any) -> str:
    """Called by MkDocs with the HTML of each page."""
    return _FORMULA.sub(_mathml, content)

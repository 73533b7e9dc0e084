"""Small pieces of HTML; everything that comes from data is escaped here."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any


def esc(content: object) -> str:
    """Escape text for HTML content and attributes.

    Example:
        >>> esc('<b> & "q"')
        '&lt;b&gt; &amp; &quot;q&quot;'
    """
    return html.escape(str(content), quote=True)


def card(name: str, big: str, note: str, *, level: str = "", picture: str = "") -> str:
    """Return a card with one number; texts are escaped, ``picture`` is an address."""
    image = f'<img src="{esc(picture)}" alt="">' if picture else ""
    wide = " wide" if picture else ""
    return (
        f'<div class="card{wide}">{image}<div><div class="name">{esc(name)}</div>'
        f'<div class="big {esc(level)}">{esc(big)}</div>'
        f'<div class="note">{esc(note)}</div></div></div>'
    )


def section(anchor: str, title: str, *content: str) -> str:
    """Return a section with a heading, or nothing if it has no content."""
    inner = "\n".join(piece for piece in content if piece)
    if not inner:
        return ""
    return f'<section id="{esc(anchor)}"><h2>{esc(title)}</h2>\n{inner}\n</section>'


def table(
    head: Iterable[str],
    rows: Iterable[str],
    label: str,
    *,
    sortable: bool = False,
    sticky: bool = False,
) -> str:
    """Return a table in a container that scrolls by itself.

    Args:
        head: Header cells, as HTML.
        rows: Body rows, as HTML.
        label: What the table holds, for screen readers.
        sortable: Whether clicking a header sorts.
        sticky: Whether the first column stays in sight while the others scroll.
    """
    words = " ".join(
        word for word, on in (("sort", sortable), ("sticky", sticky)) if on
    )
    kind = f' class="{words}"' if words else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(label)}">'
        f"<table{kind}><thead><tr>{''.join(head)}</tr></thead>\n"
        f"<tbody>\n{chr(10).join(rows)}\n</tbody></table></div>"
    )


def script_json(content: Any) -> str:
    r"""Return JSON that can't end the script element that holds it.

    Example:
        >>> script_json({"a": "</script>"})
        '{"a":"\\u003c/script>"}'
    """
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c")


def figure_panel(anchor: str, figure: Any | None, *, tall: bool = False) -> str:
    """Return a panel with a plotly figure, or nothing without a figure.

    Title and menu leave the figure and become HTML, which wraps on a phone.
    """
    if figure is None:
        return ""
    content = json.loads(figure.to_json())
    layout = content["layout"]
    title = layout.pop("title", {})
    menus = layout.pop("updatemenus", [])
    layout.pop("template", None)
    layout["margin"] = {"l": 8, "r": 8, "t": 10, "b": 8}
    buttons = menus[0]["buttons"] if menus else []
    options = "".join(f"<option>{button['label']}</option>" for button in buttons)
    select = (
        f'<select id="{esc(anchor)}-select" aria-label="Quantity to show" '
        f'autocomplete="off">{options}</select>'
        if buttons
        else ""
    )
    subtitle = title.get("subtitle", {}).get("text", "")
    data = {"data": content["data"], "layout": layout, "buttons": buttons}
    height = int(layout.get("height", 400))
    return (
        f'<div class="panel"><div class="head"><div><h3>{title.get("text", "")}</h3>'
        f'<p class="sub">{subtitle}</p></div>{select}</div>'
        f'<div class="{"tall" if tall else ""}">'
        f'<div class="plot" id="{esc(anchor)}" style="height:{height}px"></div></div>'
        f'<script type="application/json" id="{esc(anchor)}-data">'
        f"{script_json(data)}</script></div>"
    )

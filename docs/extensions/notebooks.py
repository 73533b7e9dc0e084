"""Writes the notebooks of ``docs/notebooks`` from their source, the tutorials.

Blocks marked ``python`` become code cells. All else is text: fragments (``py``),
commands (``console``) and output (``text``) too. After a change to a tutorial run
``python docs/extensions/notebooks.py``; a test compares.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
NAMES = ("own-project", "attack", "defense", "federated")

_CODE = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_NOTE = re.compile(
    r'^!!! \w+ "(?P<title>[^"]*)"\n(?P<text>(?:    .*\n|\n)+)', re.MULTILINE
)
_NEAR = re.compile(r"\]\((?=[\w-]+\.md)")
_KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def cells(page: str) -> list[tuple[str, str]]:
    """The kind and text of each cell of a tutorial, in order."""
    parts = _CODE.split(page)
    found = []
    for i, part in enumerate(parts):
        if text := part.strip():
            found.append(("code" if i % 2 else "markdown", text))
    return found


def _plain(text: str) -> str:
    """Text as notebooks show it: no admonitions, links from another folder."""

    def quoted(note: re.Match[str]) -> str:
        lines = [line.strip() for line in note["text"].strip().splitlines()]
        return (
            "\n".join(f"> {line}" for line in [f"**{note['title']}.**", *lines]) + "\n"
        )

    return _NEAR.sub("](../tutorials/", _NOTE.sub(quoted, text + "\n")).strip()


def notebook(name: str) -> dict[str, Any]:
    """A tutorial as a notebook without outputs."""
    found: list[dict[str, Any]] = []
    for i, (kind, text) in enumerate(
        cells((DOCS / "tutorials" / f"{name}.md").read_text())
    ):
        source = text if kind == "code" else _plain(text)
        cell: dict[str, Any] = {
            "cell_type": kind,
            "id": f"{name}-{i}",
            "metadata": {},
            "source": source.splitlines(keepends=True),
        }
        if kind == "code":
            cell |= {"execution_count": None, "outputs": []}
        found.append(cell)
    metadata = {"kernelspec": _KERNEL, "language_info": {"name": "python"}}
    return {"cells": found, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Writes all notebooks."""
    for name in NAMES:
        text = json.dumps(notebook(name), indent=1, ensure_ascii=False) + "\n"
        (DOCS / "notebooks" / f"{name}.ipynb").write_text(text)


if __name__ == "__main__":
    main()

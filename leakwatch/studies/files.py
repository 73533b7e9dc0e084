"""How a study is kept: tables as CSV, everything as JSON, and a page with plotly."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from leakwatch.reporting.ledger.rows import inert
from leakwatch.reporting.ledger.storage import make_private_directory, write_atomically

__all__ = ["Rows", "csv_bytes", "save_study"]

Rows: TypeAlias = Sequence[Mapping[str, object]]
"""A table: one mapping of columns to values for each row, with the same keys."""


def save_study(
    directory: str | Path,
    name: str,
    *,
    tables: Mapping[str, Rows],
    content: Mapping[str, object],
    page: Callable[[], str],
) -> Path:
    """Write tables, ``name``.json and, where plotly is installed, report.html.

    Args:
        directory: Made if it is not there; files of these names are replaced.
        name: Of the JSON file, without its ending.
        tables: By file name, without its ending; empty ones are left out.
        content: Of the JSON file; no NaN, which JSON doesn't know.
        page: Returns the HTML of the report.

    Returns:
        report.html, or the JSON file where plotly is missing.
    """
    where = Path(directory)
    make_private_directory(where)
    for table, rows in tables.items():
        if rows:
            write_atomically(where / f"{table}.csv", csv_bytes(rows))
    text = json.dumps(content, allow_nan=False)
    write_atomically(where / f"{name}.json", text.encode())
    try:
        html = page()
    except ModuleNotFoundError:
        return where / f"{name}.json"
    write_atomically(where / "report.html", html.encode())
    return where / "report.html"


def csv_bytes(rows: Rows) -> bytes:
    """Return a table as a CSV file, UTF-8; the first row names the columns.

    Texts that a spreadsheet would run as formulas get a quote before them.

    Args:
        rows: At least one.
    """
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {k: inert(v) if isinstance(v, str) else v for k, v in row.items()}
        for row in rows
    )
    return text.getvalue().encode()

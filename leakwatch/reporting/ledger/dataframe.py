"""Ledger rows as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from leakwatch.reporting.extras import require
from leakwatch.reporting.ledger.rows import COLUMNS, Row
from leakwatch.reporting.quantities import class_name

if TYPE_CHECKING:
    import pandas as pd


def to_dataframe(
    records: Sequence[tuple[str, Row]], class_names: Sequence[str] | None
) -> pd.DataFrame:
    """Return (run, row) pairs as a DataFrame with the columns of a ledger part.

    Args:
        records: Name of the run and row.
        class_names: Names of the classes, by label; they add ``class_name``.

    Raises:
        ModuleNotFoundError: If pandas is not installed.
    """
    pandas = require("pandas", "RiskLedger.to_dataframe()")
    columns: dict[str, list[Any]] = {
        "run": [run for run, _ in records],
        "epoch": [row.epoch for _, row in records],
        "step": [row.step for _, row in records],
        "sample": [row.sample for _, row in records],
        "class": [row.label for _, row in records],
        "quantity": [row.quantity for _, row in records],
        "value": [row.value for _, row in records],
        "status": [row.status for _, row in records],
    }
    types = {"epoch": "int64", "step": "int64", "value": "float64"}
    types |= {"sample": "Int64", "class": "Int64"}
    frame: pd.DataFrame = pandas.DataFrame(
        {
            name: pandas.Series(columns[name], dtype=types.get(name, "object"))
            for name in COLUMNS
        }
    )
    if class_names is not None:
        frame["class_name"] = pandas.Series(
            [
                None if label is None else class_name(label, class_names)
                for label in columns["class"]
            ],
            dtype="object",
        )
    return frame

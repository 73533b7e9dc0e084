"""Ledger rows as a pandas DataFrame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING

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
    frame: pd.DataFrame = pandas.DataFrame(
        [(run, *astuple(row)) for run, row in records], columns=COLUMNS, dtype="object"
    )
    types = {"epoch": "int64", "step": "int64", "value": "float64"}
    frame = frame.astype(types | {"sample": "Int64", "class": "Int64"})
    if class_names is not None:
        names = [
            None if row.label is None else class_name(row.label, class_names)
            for _, row in records
        ]
        frame["class_name"] = pandas.Series(names, dtype="object")
    return frame

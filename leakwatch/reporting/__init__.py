"""Recording, summarising and showing what the scores say; no mathematics of its own.

- ``ledger``: the record on disk.
- ``statistics``: summaries and correlations of it.
- ``figures``: plotly figures of it.
- ``html``: the report, one file.
- ``quantities``, ``message``, ``run_facts``, ``words``: what names, entries of
  ``run.json`` and numbers mean to a reader.
- ``extras``: packages that are imported when something needs them.

Tables and figures import pandas, plotly and Jinja2 (the ``report`` extra) when they
are asked for.
"""

from __future__ import annotations

from leakwatch.reporting.figures.class_heat import classes_over_epochs
from leakwatch.reporting.figures.classes import class_bars
from leakwatch.reporting.figures.layers import layers_over_epochs, without_layers
from leakwatch.reporting.figures.risk import risk_over_epochs, time_spent
from leakwatch.reporting.figures.spectrum import eigenvalue_histogram, spectrum_by_rank
from leakwatch.reporting.html.report import write_report
from leakwatch.reporting.html.runs import write_comparison
from leakwatch.reporting.ledger.ledger import LedgerWarning, RiskLedger
from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.quantities import LAYERS, Quantity, quantities_from_metadata
from leakwatch.reporting.statistics.aggregates import (
    ClassSummary,
    Spread,
    Summary,
    spread_of_classes,
    summarize,
    summarize_classes,
    worst_samples,
)
from leakwatch.reporting.statistics.scalars import log_scalars
from leakwatch.status import STATUS_WORDS

__all__ = [
    "LAYERS",
    "STATUS_WORDS",
    "ClassSummary",
    "Column",
    "LedgerTable",
    "LedgerWarning",
    "Moment",
    "Quantity",
    "RiskLedger",
    "Row",
    "Spread",
    "Summary",
    "class_bars",
    "classes_over_epochs",
    "eigenvalue_histogram",
    "layers_over_epochs",
    "log_scalars",
    "quantities_from_metadata",
    "risk_over_epochs",
    "spectrum_by_rank",
    "spread_of_classes",
    "summarize",
    "summarize_classes",
    "time_spent",
    "without_layers",
    "worst_samples",
    "write_comparison",
    "write_report",
]

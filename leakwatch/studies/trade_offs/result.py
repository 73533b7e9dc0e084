"""What a trade-off found: cells of the grid, rows, a table, files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from leakwatch.defenses.budget import Unit
from leakwatch.notebook import Tabular
from leakwatch.reporting.ledger.storage import write_atomically
from leakwatch.reporting.words import count
from leakwatch.studies.files import csv_bytes, save_study
from leakwatch.studies.trade_offs.conclusions import conclude
from leakwatch.studies.trade_offs.outcomes import Attacked, Attacker, Outcome
from leakwatch.studies.trade_offs.report import trade_off_figure, trade_off_page
from leakwatch.studies.trade_offs.rows import (
    Cell,
    Overview,
    TradeOffRow,
    finite_or_none,
)
from leakwatch.studies.trade_offs.table import text_table

__all__ = ["TradeOff"]


@final
@dataclass(frozen=True, eq=False, repr=False)
class TradeOff(Tabular):
    """All cells of a trade-off, and what follows from them.

    Attributes:
        cells: every training, in the order in which they ran.
        attackers: who attacked.
        unit: of the budgets.
        settings: attack, samples, and so on.
        class_names: of the labels, where they are known.
    """

    cells: tuple[Cell, ...]
    attackers: tuple[Attacker, ...]
    unit: Unit
    settings: Mapping[str, object] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None

    @property
    def defenses(self) -> tuple[str, ...]:
        """Their names, ``"none"`` first."""
        return tuple(dict.fromkeys(cell.defense for cell in self.cells))

    @property
    def rows(self) -> tuple[TradeOffRow, ...]:
        """One row for each training."""
        return tuple(
            TradeOffRow.of([cell], self.attackers, cell.seed) for cell in self.cells
        )

    @property
    def summary(self) -> tuple[TradeOffRow, ...]:
        """One row for each defense and budget, or coefficient, over all seeds."""
        return self.overview.rows

    @property
    def overview(self) -> Overview:
        """What the figure, the table and the page show."""
        groups: dict[tuple[str, float], list[Cell]] = {}
        for cell in self.cells:
            groups.setdefault(cell.setting.key, []).append(cell)
        order = {name: i for i, name in enumerate(self.defenses)}
        ordered = sorted(groups, key=lambda key: (order[key[0]], key[1]))
        return Overview(
            rows=tuple(
                TradeOffRow.of(groups[key], self.attackers, None) for key in ordered
            ),
            attackers=self.attackers,
            unit=self.unit,
            seeds=len({cell.seed for cell in self.cells}),
            settings=self.settings,
        )

    def __repr__(self) -> str:
        return (
            f"TradeOff({', '.join(self.defenses)}: "
            f"{count(len(self.cells), 'training')}, "
            f"attackers {', '.join(self.attackers)})"
        )

    def records(self) -> list[dict[str, object]]:
        """One row for each defense and budget, NaN as ``None``."""
        return [row.flat() for row in self.summary]

    def plot(self) -> Any:
        """As :meth:`figure`."""
        return self.figure()

    def samples(self) -> list[dict[str, object]]:
        """One mapping for each attack on each message; NaN is ``None``."""
        return [
            _sample(cell, attacked, who, outcome)
            for cell in self.cells
            for attacked in cell.attacked
            for who, outcome in attacked.outcomes.items()
        ]

    def table(self) -> str:
        """A few lines of text: a row for each defense and budget."""
        return text_table(self.overview)

    def conclusion(self) -> str:
        """What it comes to: questions with their answers, a line each."""
        return "\n".join(f"{q} {a}" for q, a in conclude(self.overview))

    def figure(self) -> Any:
        """Privacy against utility, a line for each defense: a plotly figure.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        return trade_off_figure(self.overview)

    def to_csv(self, path: str | Path) -> Path:
        """Writes one line for each training.

        Args:
            path: of the file; its directory must exist.
        """
        where = Path(path)
        write_atomically(where, csv_bytes([row.flat() for row in self.rows]))
        return where

    def save(self, directory: str | Path) -> Path:
        """Writes trade_off.csv, samples.csv, trade_off.json and, with plotly, a report.

        Args:
            directory: made if it is not there; files of these names are replaced.

        Returns:
            report.html, or trade_off.json where plotly is missing.
        """
        cells, samples = [row.flat() for row in self.rows], self.samples()
        overview = self.overview
        return save_study(
            directory,
            "trade_off",
            tables={"trade_off": cells, "samples": samples},
            content={
                "settings": dict(self.settings),
                "unit": self.unit,
                "summary": [row.flat() for row in overview.rows],
                "cells": cells,
                "samples": samples,
            },
            page=lambda: trade_off_page(overview),
        )


def _sample(
    cell: Cell, attacked: Attacked, who: Attacker, outcome: Outcome
) -> dict[str, object]:
    row: dict[str, object] = {
        "defense": cell.defense,
        "budget": cell.budget,
        "coefficient": cell.coefficient,
        "seed": cell.seed,
        "sample": attacked.sample,
        "label": attacked.label,
        "attacker": who,
        "psnr": outcome.psnr,
        "lpips": outcome.lpips,
        "predicted_psnr": outcome.predicted,
        "predicted_at_least": outcome.at_least,
        "gradient_norm": attacked.gradient_norm,
        "delta_norm": attacked.delta_norm,
        "status": str(outcome.status),
    }
    return {k: finite_or_none(v) for k, v in row.items()}

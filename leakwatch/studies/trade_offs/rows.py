"""One training of a trade-off with its attacks, and what a table shows of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any, TypeAlias, final

from leakwatch.defenses.budget import Unit
from leakwatch.status import OK, Status
from leakwatch.studies.trade_offs.grid import Setting
from leakwatch.studies.trade_offs.outcomes import Attacked, Attacker, Outcome

__all__ = [
    "Applied",
    "Cell",
    "Overview",
    "TradeOffRow",
    "decoded",
    "encoded",
    "finite_or_none",
]

Spread: TypeAlias = tuple[float, float]
"""The least and the largest of several values; NaN without any."""


@final
@dataclass(frozen=True)
class Applied:
    """What a defense really did to the gradients that training consumed.

    Attributes:
        steps: of the optimiser.
        asked: √E‖δ‖² stated, root mean square over steps, gradient units.
        norm: ‖δ‖ measured, the same.
        relative: ‖δ‖/‖g‖, the same.
        seconds: that the defense took.
        epsilon: ε of differential privacy that training cost; NaN where none is known.
        delta: at which δ.
    """

    steps: int
    asked: float
    norm: float
    relative: float
    seconds: float = 0.0
    epsilon: float = math.nan
    delta: float = math.nan


@final
@dataclass(frozen=True, eq=False)
class Cell:
    """One training under one defense, and the attacks on what it ended with.

    Attributes:
        defense: its name, ``"none"`` without.
        budget: in the unit of the grid; 0 without a defense, NaN for mixtures.
        seed: of data order and noise.
        accuracy: on test data, in [0, 1]; NaN if the cell failed before.
        attacked: by sample; empty if the cell failed.
        applied: in training; ``None`` without a defense, or if it is not known.
        status: ``failed`` with the reason, of a cell that says nothing.
        coefficient: of mixtures, the share of the private sample; ``None`` for others.
    """

    defense: str
    budget: float
    seed: int
    accuracy: float
    attacked: tuple[Attacked, ...] = ()
    applied: Applied | None = None
    status: Status = OK
    coefficient: float | None = None

    @property
    def setting(self) -> Setting:
        """The setting of the defense."""
        return Setting(self.defense, self.budget, self.coefficient)


def encoded(cell: Cell) -> dict[str, Any]:
    """A cell as JSON holds it; backwards: :func:`decoded`.

    Args:
        cell: any.
    """
    return {**vars(cell), "attacked": [asdict(a) for a in cell.attacked]} | {
        "applied": None if cell.applied is None else asdict(cell.applied),
    }


def decoded(plain: Mapping[str, Any]) -> Cell:
    """The cell that :func:`encoded` made this of.

    Args:
        plain: as read.

    Raises:
        KeyError: for something else.
        TypeError: the same.
    """
    applied = plain["applied"]
    return Cell(
        **{
            **plain,
            "status": Status(*plain["status"]),
            "applied": None if applied is None else Applied(**applied),
            "attacked": tuple(_attacked(a) for a in plain["attacked"]),
        }
    )


def _attacked(plain: Mapping[str, Any]) -> Attacked:
    outcomes = {
        who: Outcome(**{**outcome, "status": Status(*outcome["status"])})
        for who, outcome in plain["outcomes"].items()
    }
    return Attacked(**{**plain, "outcomes": outcomes})


@final
@dataclass(frozen=True)
class TradeOffRow:
    """One defense at one budget: all that a figure or table shows of it.

    PSNR: higher = more exposed; LPIPS: higher = less exposed. NaN: not known, which is
    not safe.

    Attributes:
        defense: its name.
        budget: in the unit of the grid; NaN for mixtures, of which none is asked.
        coefficient: of mixtures, the share of the private sample; ``None`` for others.
        seed: of a single cell; ``None`` over all seeds.
        accuracy: mean over seeds.
        psnr: attacker → median over samples and seeds, dB; NaN where the attack was
            conclusive on less than half of them.
        worst: attacker → the largest, dB: of the most exposed sample.
        lpips: attacker → median.
        predicted: attacker → median of the prediction, dB.
        spread: attacker → least and largest PSNR of conclusive attacks, dB.
        predicted_spread: attacker → least and largest prediction, dB.
        accuracy_spread: least and largest over seeds.
        inconclusive: attacker → messages that the attack did not match.
        unpredicted: attacker → messages without a prediction.
        predicted_bounds: attacker → messages of which the prediction is "at least".
        messages: how many were attacked.
        training_asked: √E‖δ‖² that was stated of what training consumed, gradient
            units.
        training_norm: ‖δ‖ measured of it.
        training_relative: the same over ‖g‖.
        message_relative: the same of the messages that were attacked, median.
        epsilon: ε of differential privacy, the largest of all seeds; NaN where that of
            one of them is not known, infinite without a defense.
        delta: at which δ; NaN where no ε is known.
        failed: cells that failed, of ``cells``.
        cells: how many there are.
        status: why, where cells failed.
    """

    defense: str
    budget: float
    coefficient: float | None
    seed: int | None
    accuracy: float
    psnr: Mapping[Attacker, float]
    worst: Mapping[Attacker, float]
    lpips: Mapping[Attacker, float]
    predicted: Mapping[Attacker, float]
    spread: Mapping[Attacker, Spread]
    predicted_spread: Mapping[Attacker, Spread]
    accuracy_spread: Spread
    inconclusive: Mapping[Attacker, int]
    unpredicted: Mapping[Attacker, int]
    predicted_bounds: Mapping[Attacker, int]
    messages: int
    training_asked: float
    training_norm: float
    training_relative: float
    message_relative: float
    epsilon: float
    delta: float
    failed: int
    cells: int
    status: str

    @classmethod
    def of(
        cls, cells: Sequence[Cell], attackers: Sequence[Attacker], seed: int | None
    ) -> TradeOffRow:
        """Summarises cells of one defense and budget.

        Args:
            cells: at least one.
            attackers: who attacked.
            seed: that of the only cell, or ``None``.
        """
        messages = [a for cell in cells for a in cell.attacked]
        applied = [cell.applied for cell in cells if cell.applied is not None]
        failed = [cell for cell in cells if not cell.status.usable]
        outcomes = {
            who: [a.outcomes[who] for a in messages if who in a.outcomes]
            for who in attackers
        }
        good = {
            who: [o for o in all if o.status.usable] for who, all in outcomes.items()
        }
        # Half of the messages of cells that failed are unknown as well.
        expected = max((len(c.attacked) for c in cells), default=0) * len(cells)
        enough = {who: 2 * len(g) >= max(expected, 1) for who, g in good.items()}
        return cls(
            defense=cells[0].defense,
            budget=cells[0].budget,
            coefficient=cells[0].coefficient,
            seed=seed,
            accuracy=_mean([c.accuracy for c in cells]),
            psnr={
                who: _median([o.psnr for o in g]) if enough[who] else math.nan
                for who, g in good.items()
            },
            worst={
                who: max((o.psnr for o in g), default=math.nan)
                for who, g in good.items()
            },
            lpips={
                who: _median([o.lpips for o in g]) if enough[who] else math.nan
                for who, g in good.items()
            },
            predicted={
                w: _median([o.predicted for o in g]) for w, g in outcomes.items()
            },
            spread={w: _spread([o.psnr for o in g]) for w, g in good.items()},
            predicted_spread={
                w: _spread([o.predicted for o in g]) for w, g in outcomes.items()
            },
            accuracy_spread=_spread([c.accuracy for c in cells]),
            inconclusive={w: len(outcomes[w]) - len(good[w]) for w in attackers},
            unpredicted={
                w: sum(math.isnan(o.predicted) for o in outcomes[w]) for w in attackers
            },
            predicted_bounds={
                w: sum(o.at_least for o in outcomes[w]) for w in attackers
            },
            messages=len(messages),
            training_asked=_mean([a.asked for a in applied]),
            training_norm=_mean([a.norm for a in applied]),
            training_relative=_mean([a.relative for a in applied]),
            message_relative=_median([a.relative for a in messages]),
            epsilon=_epsilon(cells),
            delta=_mean([a.delta for a in applied]),
            failed=len(failed),
            cells=len(cells),
            status=str(failed[0].status) if failed else "ok",
        )

    @property
    def setting(self) -> Setting:
        """The setting of the defense."""
        return Setting(self.defense, self.budget, self.coefficient)

    def conclusive(self, who: Attacker) -> int:
        """Messages that this attacker matched."""
        return self.messages - self.inconclusive[who]

    def flat(self) -> dict[str, object]:
        """Column → value, NaN as ``None``: a row of a CSV file or a data frame."""
        out: dict[str, object] = {
            "defense": self.defense,
            "budget": self.budget,
            "coefficient": self.coefficient,
            "seed": self.seed,
            "accuracy": self.accuracy,
        }
        for who in self.psnr:
            out |= {
                f"{who}_psnr": self.psnr[who],
                f"{who}_worst_psnr": self.worst[who],
                f"{who}_lpips": self.lpips[who],
                f"{who}_predicted_psnr": self.predicted[who],
                f"{who}_inconclusive": self.inconclusive[who],
                f"{who}_unpredicted": self.unpredicted[who],
                f"{who}_predicted_bounds": self.predicted_bounds[who],
            }
        out |= {
            "messages": self.messages,
            "training_asked": self.training_asked,
            "training_norm": self.training_norm,
            "training_relative": self.training_relative,
            "message_relative": self.message_relative,
            "epsilon": self.epsilon,
            "delta": self.delta,
            "failed": self.failed,
            "cells": self.cells,
            "status": self.status,
        }
        return {k: finite_or_none(v) for k, v in out.items()}


@final
@dataclass(frozen=True, eq=False)
class Overview:
    """What a figure, a table and a page show of a trade-off.

    Attributes:
        rows: one for each defense and budget, or coefficient, over all seeds.
        attackers: who attacked.
        unit: of the budgets.
        seeds: how many.
        settings: attack, samples, and so on.
    """

    rows: tuple[TradeOffRow, ...]
    attackers: tuple[Attacker, ...]
    unit: Unit
    seeds: int
    settings: Mapping[str, object]

    @property
    def defenses(self) -> tuple[str, ...]:
        """Their names, in the order of the rows."""
        return tuple(dict.fromkeys(row.defense for row in self.rows))

    @property
    def mixes(self) -> bool:
        """Whether there are mixtures among them."""
        return any(row.coefficient is not None for row in self.rows)

    @property
    def delta(self) -> float:
        """δ of the ε that are known; NaN where none is."""
        known = [row.delta for row in self.rows if math.isfinite(row.epsilon)]
        return known[0] if known else math.nan

    @property
    def queries(self) -> object:
        """How often each message was asked for."""
        return self.settings.get("queries", 1)


def _epsilon(cells: Sequence[Cell]) -> float:
    if all(cell.setting == Setting() for cell in cells):
        return math.inf
    each = [math.nan if c.applied is None else c.applied.epsilon for c in cells]
    return math.nan if any(map(math.isnan, each)) else max(each)


def finite_or_none(value: object) -> object:
    """What JSON can hold: it knows neither NaN nor infinity."""
    bad = isinstance(value, float) and not math.isfinite(value)
    return None if bad else value


def _mean(values: Sequence[float]) -> float:
    numbers = [v for v in values if not math.isnan(v)]
    return fmean(numbers) if numbers else math.nan


def _spread(values: Sequence[float]) -> Spread:
    numbers = [v for v in values if not math.isnan(v)]
    return (min(numbers), max(numbers)) if numbers else (math.nan, math.nan)


def _median(values: Sequence[float]) -> float:
    numbers = [v for v in values if not math.isnan(v)]
    return median(numbers) if numbers else math.nan

"""What a comparison of initialisations found: values, table, verdicts, files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from leakwatch.names import meant
from leakwatch.notebook import Tabular
from leakwatch.reporting.quantities import HEADLINES, PRIOR, Quantity
from leakwatch.reporting.statistics.achieved import FEWEST_ATTACKS
from leakwatch.reporting.words import NO_RANKS, aligned, count
from leakwatch.studies.files import save_study
from leakwatch.studies.initializations.conclusions import conclude
from leakwatch.studies.initializations.points import (
    Moment,
    Point,
    bounded,
    cells,
    logarithmic,
)
from leakwatch.studies.initializations.ranking import Ranked, Verdict, rank
from leakwatch.studies.initializations.report import (
    RankedQuantity,
    Ranking,
    comparison_figure,
    comparison_page,
)

#: What the short table shows, in this order, before the errors of attacks.
_SHOWN: Final = (
    "i2f_range_psnr",
    "i2f_bayes_psnr",
    "i2f",
    "inverse_sum",
    "lavp_l2_max",
    "lavp_l2_min",
    "resolved_rank",
)


@final
@dataclass(frozen=True, eq=False, repr=False)
class InitializationComparison(Tabular):
    """All values of a comparison, and what follows from them.

    Attributes:
        points: every value with its status.
        schemes: names of the initialisations.
        seeds: of the weights.
        samples: data-set indices.
        quantities: name → unit, direction, meaning.
        settings: noise, attacks, and so on.
        class_names: of the labels, where they are known.
    """

    points: tuple[Point, ...]
    schemes: tuple[str, ...]
    seeds: tuple[int, ...]
    samples: tuple[int, ...]
    quantities: Mapping[str, Quantity]
    settings: Mapping[str, object] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None

    @property
    def moments(self) -> tuple[Moment, ...]:
        """When was measured: at initialisation, and after training if there was any."""
        return tuple(dict.fromkeys(p.moment for p in self.points))

    @property
    def attacks(self) -> tuple[str, ...]:
        """Quantities that attacks achieved."""
        return tuple(name for name in self.quantities if name.endswith("_mse"))

    def matched(self, quantity: str, moment: Moment = "initial") -> bool:
        """Whether any attack matched its gradient; false of scores, which are none.

        Args:
            quantity: of an attack.
            moment: ``"initial"`` or ``"trained"``.

        Raises:
            ValueError: as :meth:`of`.
        """
        return any(p.matched for p in self.of(quantity, moment))

    def of(self, quantity: str, moment: Moment = "initial") -> tuple[Point, ...]:
        """The values of one quantity.

        Raises:
            ValueError: for a quantity or a moment that was not measured.
        """
        self._check(quantity, moment)
        return tuple(
            p for p in self.points if p.quantity == quantity and p.moment == moment
        )

    def verdict(
        self,
        quantity: str | None = None,
        moment: Moment = "initial",
        *,
        level: float = 0.95,
        resamples: int = 4000,
    ) -> Verdict:
        """Ranks the initialisations, most exposed first.

        Means over seeds and samples (geometric, except for decibels, bits and counts),
        with a bootstrap over both. Two initialisations are told apart when the interval
        of their difference over the same samples excludes zero.

        Args:
            quantity: a score, or ``"<attack>_mse"``; default: the predicted PSNR.
            moment: ``"initial"`` or ``"trained"``.
            level: coverage of the intervals, in (0, 1).
            resamples: of the bootstrap.

        Raises:
            ValueError: for a quantity or moment that was not measured, or a quantity
                that does not say which end is exposed.
        """
        name = self._lead if quantity is None else quantity
        points = self.of(name, moment)
        about = self.quantities[name]
        log = logarithmic(about)
        values = cells(points, self.schemes, self.seeds, self.samples, log=log)
        verdict = rank(
            values,
            self.schemes,
            about,
            log=log,
            level=level,
            resamples=resamples,
            notes=self._matched(points),
            bounds=bounded(points, self.schemes, self.seeds, self.samples),
        )
        conclusive = sum(p.matched is True for p in points)
        if name in self.attacks and conclusive < FEWEST_ATTACKS:
            why = (
                f"{count(conclusive, 'conclusive attack')}: too few for an interval, "
                f"which takes {FEWEST_ATTACKS}."
            )
            return verdict.without_intervals(why)
        return verdict

    def conclusion(self, moment: Moment = "initial") -> str:
        """Which initialisation exposes least, by how much, and what attacks say to it.

        Args:
            moment: ``"initial"`` or ``"trained"``.

        Returns:
            A few sentences, each with the numbers behind it.

        Raises:
            ValueError: as :meth:`of`.
        """
        attacks = {name: self.of(name, moment) for name in self.attacks}
        prior = self.settings.get("prior")
        return conclude(
            self.verdict(None, moment),
            {name: points for name, points in attacks.items() if points},
            float(str(self.settings.get("data_range") or 1.0)),
            str(prior) if prior else PRIOR,
        )

    def __repr__(self) -> str:
        return (
            f"InitializationComparison({', '.join(self.schemes)}: "
            f"{len(self.seeds)} seeds, {len(self.samples)} samples)"
        )

    def records(self) -> list[dict[str, object]]:
        """Means and intervals, as :meth:`summary`."""
        return self.summary()

    def plot(self, moment: Moment = "initial") -> Any:
        """As :meth:`figure`."""
        return self.figure(moment)

    def rows(self) -> list[dict[str, object]]:
        """One mapping for each value; NaN is ``None``."""
        return [point.row() for point in self.points]

    def summary(self) -> list[dict[str, object]]:
        """Mean and interval by moment, quantity and scheme, for quantities that rank.

        ``known`` is false, and the mean not to be read, where more than half of the
        values are missing. With any ``bounds`` among the ``used``, exposure is at least
        what the mean says.
        """
        lines: list[dict[str, object]] = []
        for moment in self.moments:
            for quantity, about in self.quantities.items():
                if about.sign == 0:
                    continue
                verdict = self.verdict(quantity, moment)
                ranked: list[tuple[Ranked, bool]] = [(r, True) for r in verdict.ranked]
                ranked += [(r, False) for r in verdict.unknown]
                lines += [
                    {
                        "moment": moment,
                        "quantity": quantity,
                        "unit": about.unit,
                        "scheme": r.scheme,
                        "known": known,
                        "mean": r.mean if known else None,
                        "low": r.low if known and r.low == r.low else None,
                        "high": r.high if known and r.high == r.high else None,
                        "used": r.used,
                        "count": r.count,
                        "bounds": r.bounds,
                        "order": verdict.order,
                    }
                    for r, known in ranked
                ]
        return lines

    def table(self, moment: Moment = "initial") -> str:
        """A few lines of text: one for each initialisation, most exposed first."""
        candidates = dict.fromkeys((self._lead, *_SHOWN, *self.attacks))
        names = [n for n in candidates if n in self.quantities]
        verdicts = {name: self.verdict(name, moment) for name in names}
        lead = verdicts.get(self._lead, verdicts[names[0]])
        order = [r.scheme for r in (*lead.ranked, *lead.unknown)]
        means = {
            (name, r.scheme): verdict.written(r)
            for name, verdict in verdicts.items()
            for r in verdict.ranked
        }
        grid = [["scheme", *names]]
        grid += [[s, *(means.get((n, s), "not known") for n in names)] for s in order]
        bounds = any(r.bounds for verdict in verdicts.values() for r in verdict.ranked)
        return aligned(grid) + (f"\n  ≥ and ≤: {NO_RANKS}" if bounds else "")

    def figure(self, moment: Moment = "initial") -> Any:
        """I²F's Figure 7 with every sample shown: a plotly figure.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        return comparison_figure(self._ranking(moment))

    def save(self, directory: str | Path) -> Path:
        """Writes values.csv, summary.csv, comparison.json and, with plotly, a report.

        Args:
            directory: made if it is not there; files of these names are replaced.

        Returns:
            report.html, or comparison.json where plotly is missing.
        """
        values, summary = self.rows(), self.summary()
        return save_study(
            directory,
            "comparison",
            tables={"values": values, "summary": summary},
            content={
                "settings": dict(self.settings),
                "schemes": self.schemes,
                "seeds": self.seeds,
                "samples": self.samples,
                "summary": summary,
                "values": values,
            },
            page=lambda: comparison_page(
                [self._ranking(moment) for moment in self.moments], self.settings
            ),
        )

    def _ranking(self, moment: Moment) -> Ranking:
        """What the report shows of one moment.

        Predictions come first, then attacks of which any matched, attacks that all
        failed, and the rest.
        """
        matched = [name for name in self.attacks if self.matched(name, moment)]
        headlines = [name for name in HEADLINES if name in self.quantities]
        first = [self._lead] if self._lead in self.quantities else []
        names = dict.fromkeys(
            [*first, *headlines, *matched, *self.attacks, *self.quantities]
        )
        return Ranking(
            moment=moment,
            conclusion=self.conclusion(moment),
            quantities=tuple(
                RankedQuantity(
                    about=self.quantities[name],
                    verdict=self.verdict(name, moment),
                    points=self.of(name, moment),
                    leads=name in (*self.attacks, *headlines),
                    unmatched=name in self.attacks and name not in matched,
                )
                for name in names
                if self.quantities[name].sign
            ),
            schemes=self.schemes,
            seeds=self.seeds,
            samples=self.samples,
            noise_std=self.settings.get("noise_std"),
            class_names=self.class_names,
        )

    @property
    def _lead(self) -> str:
        """The predicted PSNR that was measured: ranks where nothing is named."""
        known = {p.quantity for p in self.points if p.usable}
        return next((name for name in HEADLINES if name in known), "i2f_psnr")

    def _check(self, quantity: str, moment: str) -> None:
        if quantity not in self.quantities:
            raise ValueError(
                f"{quantity!r} was not measured; "
                f"{meant(quantity, self.quantities)}choose from "
                f"{', '.join(self.quantities)}."
            )
        if moment not in self.moments:
            raise ValueError(
                f"nothing was measured at the moment {moment!r}, only at "
                f"{', '.join(self.moments)}; give a function train to measure after "
                "training."
            )

    def _matched(self, points: Sequence[Point]) -> list[str]:
        """What to know about attacks that failed."""
        tried = [p for p in points if p.matched is not None]
        good = {
            scheme: sum(bool(p.matched) for p in tried if p.scheme == scheme)
            for scheme in self.schemes
        }
        if sum(good.values()) == len(tried):
            return []
        if not any(good.values()):
            return [
                f"none of {len(tried)} attacks matched the gradient, so that this "
                "order says how they fail, not how exposed a sample is; a failed "
                "attack does not say that a sample is safe."
            ]
        each = {s: sum(p.scheme == s for p in tried) for s in self.schemes}
        counts = ", ".join(f"{s} {good[s]} of {each[s]}" for s in self.schemes)
        return [
            f"attacks that matched the gradient: {counts}; the errors of those that "
            "failed are in these means, as in the paper: they say how an attack "
            "fails, and a failed attack does not say that a sample is safe."
        ]

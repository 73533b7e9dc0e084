"""Every score against every quality metric, in the shape of LAVP's Tables 1 to 3."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.statistics.correlation import (
    Correlation,
    resampled_spearman,
    spearman,
)
from leakwatch.status import OK, Status

__all__ = ["AverageCorrelation", "CorrelationTable", "Measurement", "correlation_table"]


@final
@dataclass(frozen=True)
class Measurement:
    """Scores and qualities of the same samples, under one network and one attack.

    Args:
        setting: row of the table: data set and attack, such as ``"MNIST + L2"``.
        architecture: the network; correlations are averaged over these.
        scores: score → one value per sample, NaN where there is none.
        metrics: quality metric → the same. NaN also of attacks that were not
            conclusive, unless how attacks fail is what is studied: LAVP's tables
            include failures.

    Raises:
        ValueError: if columns differ in length, or scores or metrics are missing.
    """

    setting: str
    architecture: str
    scores: Mapping[str, npt.ArrayLike]
    metrics: Mapping[str, npt.ArrayLike]

    def __post_init__(self) -> None:
        columns = {**self.scores, **self.metrics}
        lengths = {name: np.shape(column) for name, column in columns.items()}
        if not self.scores or not self.metrics or len(set(lengths.values())) != 1:
            raise ValueError(
                f"a measurement needs scores and metrics, one value for each of the "
                f"same samples; got shapes {lengths}."
            )


@final
@dataclass(frozen=True)
class AverageCorrelation:
    """Mean of a correlation over architectures, as LAVP reports it.

    Attributes:
        rho: mean over the architectures where it is defined, NaN if nowhere.
        architectures: how many those are.
        n: the samples of each of them added up.
        p_value: two-sided, of no association in any of them, by the normal
            approximation Σρ/√Σ1/(n−1), as if architectures were independent.
        low: lower end of the 95 % bootstrap interval of the mean; samples are drawn
            alike for architectures with equally many.
        high: upper end.
        status: ``ok``, ``estimated`` when an architecture is undefined or small,
            ``undefined`` when all are.
    """

    rho: float
    architectures: int
    n: int
    p_value: float
    low: float
    high: float
    status: Status

    @property
    def clear(self) -> bool:
        """Whether the bootstrap interval excludes zero."""
        return self.low > 0 or self.high < 0


@final
@dataclass(frozen=True, eq=False)
class CorrelationTable:
    """Correlations by (setting, architecture, score, metric), and their averages.

    Attributes:
        cells: per architecture.
        averages: by (setting, score, metric), over architectures.
    """

    cells: dict[tuple[str, str, str, str], Correlation]
    averages: dict[tuple[str, str, str], AverageCorrelation]

    @property
    def settings(self) -> tuple[str, ...]:
        """In the order of the measurements."""
        return tuple(dict.fromkeys(key[0] for key in self.averages))

    @property
    def scores(self) -> tuple[str, ...]:
        """In the order of the measurements."""
        return tuple(dict.fromkeys(key[1] for key in self.averages))

    @property
    def metrics(self) -> tuple[str, ...]:
        """In the order of the measurements."""
        return tuple(dict.fromkeys(key[2] for key in self.averages))

    def rows(self) -> list[dict[str, str | int | float]]:
        """One row for each architecture's cell and each average, for a CSV file."""
        keys = ("setting", "architecture", "score", "metric")
        numbers = ("rho", "n", "p_value", "low", "high")
        entries: list[tuple[tuple[str, ...], Correlation | AverageCorrelation]] = [
            *self.cells.items(),
            *(((key[0], "average", *key[1:]), v) for key, v in self.averages.items()),
        ]
        return [
            {
                **dict(zip(keys, place, strict=True)),
                **{name: getattr(value, name) for name in numbers},
                "status": str(value.status),
            }
            for place, value in entries
        ]

    def to_markdown(self, architecture: str | None = None) -> str:
        """A table with one row per setting and one column per score.

        Each entry holds the correlations with all metrics, in order, as in LAVP's
        Table 1. An asterisk: the 95 % interval excludes zero. "u": undefined.

        Args:
            architecture: of this one; ``None``: averaged.

        Raises:
            ValueError: for an architecture that was not measured.
        """
        measured = dict.fromkeys(key[1] for key in self.cells)
        if architecture is not None and architecture not in measured:
            raise ValueError(
                f"no architecture {architecture!r} in this table; it holds "
                f"{', '.join(measured)}."
            )
        lines = [
            f"| ρ ({' / '.join(self.metrics)}) | {' | '.join(self.scores)} |",
            "|---" * (len(self.scores) + 1) + "|",
        ]
        for setting in self.settings:
            entries = [
                " / ".join(
                    _short(self._at(setting, architecture, score, metric))
                    for metric in self.metrics
                )
                for score in self.scores
            ]
            lines.append(f"| {setting} | {' | '.join(entries)} |")
        return "\n".join(lines)

    def _at(
        self, setting: str, architecture: str | None, score: str, metric: str
    ) -> Correlation | AverageCorrelation | None:
        if architecture is None:
            return self.averages.get((setting, score, metric))
        return self.cells.get((setting, architecture, score, metric))


def correlation_table(
    measurements: Iterable[Measurement], *, bootstrap: int = 1000, seed: int = 0
) -> CorrelationTable:
    """Correlates every score with every metric, and averages over architectures.

    Source: Hong et al., LAVP, Tables 1 to 3 ("σ_S is computed for each architecture
    and their average is reported"). Averages leave out architectures where the
    correlation is undefined and say so.

    Args:
        measurements: one for each setting and architecture.
        bootstrap: resamples for each interval.
        seed: of the resampling.

    Returns:
        The table.

    Raises:
        ValueError: if there are none, or two for one setting and architecture.

    Example:
        >>> up, down = [1.0, 2.0, 3.0, 4.0], [4.0, 3.0, 2.0, 1.0]
        >>> scores, metrics = {"i2f": up}, {"mse": up, "ssim": down}
        >>> nets = [Measurement("MNIST + L2", net, scores, metrics)
        ...         for net in ("lenet", "resnet8")]
        >>> print(correlation_table(nets, bootstrap=50).to_markdown())
        | ρ (mse / ssim) | i2f |
        |---|---|
        | MNIST + L2 | +1.00* / -1.00* |
    """
    cells: dict[tuple[str, str, str, str], Correlation] = {}
    draws: dict[tuple[str, str, str], list[npt.NDArray[np.float64]]] = {}
    seen: set[tuple[str, str]] = set()
    for m in measurements:
        if (m.setting, m.architecture) in seen:
            raise ValueError(
                f"two measurements of {m.architecture!r} for {m.setting!r}; give each "
                f"setting a name of its own."
            )
        seen.add((m.setting, m.architecture))
        for score, a in m.scores.items():
            for metric, b in m.metrics.items():
                correlation = spearman(a, b, bootstrap=bootstrap, seed=seed)
                cells[m.setting, m.architecture, score, metric] = correlation
                into = draws.setdefault((m.setting, score, metric), [])
                if correlation.status.usable and bootstrap:
                    into.append(
                        resampled_spearman(a, b, resamples=bootstrap, seed=seed)
                    )
    if not cells:
        raise ValueError("correlation_table needs at least one measurement.")
    averages = {}
    for key, drawn in draws.items():
        setting, score, metric = key
        group = [
            c
            for (s, _, sc, me), c in cells.items()
            if (s, sc, me) == (setting, score, metric)
        ]
        averages[key] = _average(group, drawn)
    return CorrelationTable(cells, averages)


def _average(
    group: list[Correlation], draws: list[npt.NDArray[np.float64]]
) -> AverageCorrelation:
    usable = [c for c in group if c.status.usable]
    missing = len(group) - len(usable)
    if not usable:
        reasons = "; ".join(dict.fromkeys(c.status.reason for c in group))
        nan = math.nan
        status = Status("undefined", f"in every architecture: {reasons}")
        return AverageCorrelation(nan, 0, 0, nan, nan, nan, status)
    status = OK
    if missing:
        status = Status(
            "estimated", f"undefined in {missing} of {len(group)} architectures"
        )
    elif any(c.status != OK for c in usable):
        status = Status("estimated", f"from {min(c.n for c in usable)} pairs only")
    low = high = math.nan
    if draws:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # means of nothing but NaN
            mean = np.nanmean(np.stack(draws), axis=0)
        mean = mean[~np.isnan(mean)]
        if len(mean):
            low, high = (float(q) for q in np.quantile(mean, [0.025, 0.975]))
    total = sum(c.rho for c in usable)
    z = abs(total) / math.sqrt(sum(1 / (c.n - 1) for c in usable))
    return AverageCorrelation(
        rho=total / len(usable),
        architectures=len(usable),
        n=sum(c.n for c in usable),
        p_value=math.erfc(z / math.sqrt(2)),
        low=low,
        high=high,
        status=status,
    )


def _short(value: Correlation | AverageCorrelation | None) -> str:
    if value is None:
        return "–"
    if not value.status.usable:
        return "u"
    return f"{value.rho:+.2f}{'*' if value.clear else ''}"

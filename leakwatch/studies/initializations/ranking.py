"""Which of several groups is more exposed, and which can't be told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.quantities import Quantity
from leakwatch.reporting.words import number
from leakwatch.studies.initializations.resampling import (
    resampled_means,
    widened_interval,
)

# A group of which less than this share is known has no rank.
_KNOWN: Final = 0.5


@final
@dataclass(frozen=True)
class Ranked:
    """One group in a ranking.

    Attributes:
        scheme: its name.
        mean: over seeds and samples; geometric where values spread over decades.
        low: lower end of the interval of the mean.
        high: upper end.
        used: cells (seed × sample) that have a value.
        count: cells in all.
    """

    scheme: str
    mean: float
    low: float
    high: float
    used: int
    count: int


@final
@dataclass(frozen=True)
class Verdict:
    """A ranking with its uncertainty.

    Attributes:
        quantity: what was compared.
        ranked: most exposed first, without groups that are unknown.
        apart: pairs of names that are told apart.
        unknown: groups of which more than half has no value; that is not safety.
        level: coverage of the intervals of single means; those of differences share
            1 − level between all pairs (Bonferroni).
        notes: what the intervals leave out.
    """

    quantity: Quantity
    ranked: tuple[Ranked, ...]
    apart: frozenset[frozenset[str]]
    unknown: tuple[Ranked, ...]
    level: float
    notes: tuple[str, ...] = ()

    def told_apart(self, first: str, second: str) -> bool:
        """Whether the interval of the difference of two groups excludes zero."""
        return frozenset((first, second)) in self.apart

    @property
    def order(self) -> str:
        """The ranking in one line, neighbours that aren't told apart joined by ≈."""
        out = ""
        for i, group in enumerate(self.ranked):
            if i:
                before = self.ranked[i - 1].scheme
                out += " > " if self.told_apart(before, group.scheme) else " ≈ "
            out += group.scheme
        return out

    def __str__(self) -> str:
        unit = f" {self.quantity.unit}" if self.quantity.unit else ""
        lines = [f"{self.quantity.name}, most exposed first: {self.order or '–'}"]
        lines += [
            f"  {r.scheme}: {number(r.mean)}{unit} "
            f"[{_end(r.low)}, {_end(r.high)}], {r.used} of {r.count}"
            for r in self.ranked
        ]
        lines += [
            f"  {r.scheme}: not known, which is not safe; {r.used} of {r.count} values"
            for r in self.unknown
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def rank(
    values: npt.NDArray[np.float64],
    schemes: Sequence[str],
    quantity: Quantity,
    *,
    log: bool,
    level: float = 0.95,
    resamples: int = 4000,
    notes: Sequence[str] = (),
) -> Verdict:
    """Rank groups by how exposed a quantity says that they are.

    Two groups are told apart when the interval of the difference of their means, over
    the same samples, excludes zero. Intervals are widened as Student's t is for as
    few seeds, or samples, as there are.

    Args:
        values: ``(schemes, seeds, samples)``, logarithms to base 10 if ``log``.
        schemes: names.
        quantity: what the values are; its direction says which end is exposed.
        log: whether means are to be raised to powers of 10.
        level: coverage of intervals, in (0, 1).
        resamples: of the bootstrap.
        notes: to add to those made here.

    Raises:
        ValueError: the quantity has no direction, or the level is out of range.

    Example:
        >>> values = np.array([[[1.0, 1.2, 0.9]], [[3.0, 3.1, 3.3]]])
        >>> q = Quantity("q", direction="higher = more exposed")
        >>> found = rank(values, ["a", "b"], q, log=False)
        >>> found.order, found.told_apart("a", "b"), found.notes[0][:8]
        ('b > a', True, 'one seed')
    """
    if not 0 < level < 1:
        raise ValueError(f"level must lie inside (0, 1), got {level}.")
    if quantity.sign == 0:
        raise ValueError(
            f"{quantity.name} does not say by itself which end is more exposed, so it "
            "can't rank; choose another quantity, such as 'i2f_bayes_psnr'."
        )
    _, seeds, samples = values.shape
    draws = resampled_means(values, resamples=resamples)
    used = (~np.isnan(values)).sum((1, 2))
    means = [
        float(np.nanmean(v)) if n else math.nan
        for v, n in zip(values, used, strict=True)
    ]
    groups = []
    for i, (scheme, mean) in enumerate(zip(schemes, means, strict=True)):
        ends = widened_interval(draws[i], mean, level, _degrees(seeds, samples, 1))
        centre, low, high = (10.0**v if log else v for v in (mean, *ends))
        groups.append(Ranked(scheme, centre, low, high, int(used[i]), seeds * samples))
    known = [i for i, g in enumerate(groups) if g.used > _KNOWN * g.count]
    known.sort(key=lambda i: -quantity.sign * groups[i].mean)
    pairs = [(i, j) for place, i in enumerate(known) for j in known[place + 1 :]]
    shared = 1 - (1 - level) / max(len(pairs), 1)
    apart = set()
    for i, j in pairs:
        ends = widened_interval(
            draws[i] - draws[j],
            means[i] - means[j],
            shared,
            _degrees(seeds, samples, 2),
        )
        if ends[0] > 0 or ends[1] < 0:
            apart.add(frozenset((schemes[i], schemes[j])))
    return Verdict(
        quantity=quantity,
        ranked=tuple(groups[i] for i in known),
        apart=frozenset(apart),
        unknown=tuple(g for i, g in enumerate(groups) if i not in known),
        level=level,
        notes=(*_limits(seeds, samples), *notes),
    )


def _degrees(seeds: int, samples: int, groups: int) -> int:
    """Degrees of freedom of the spread: those of the factor that has fewer.

    Samples are the same in all groups, seeds are not.
    """
    found = [groups * (seeds - 1), samples - 1]
    return min((d for d in found if d > 0), default=0)


def _limits(seeds: int, samples: int) -> list[str]:
    if seeds * samples == 1:
        return ["one seed and one sample: nothing can be told apart."]
    found = []
    if seeds == 1:
        found.append("one seed: this compares these weights, not the initialisations.")
    if samples == 1:
        found.append("one sample: intervals leave out how much samples differ.")
    return found


def _end(value: float) -> str:
    return "not known" if math.isnan(value) else number(value)

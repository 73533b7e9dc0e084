"""Which of several groups is more exposed, and which can't be told apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri, stdtrit

from leakwatch.checks import check_number
from leakwatch.reporting.quantities import Quantity
from leakwatch.reporting.words import NO_RANKS, count, number, sign_of_bound

# A group of which less than this share is known has no rank.
_KNOWN: Final = 0.5

_Array = npt.NDArray[np.float64]


@final
@dataclass(frozen=True)
class Ranked:
    """One group in a ranking.

    Attributes:
        scheme: its name.
        mean: over seeds and samples; geometric where values spread over decades.
        low: lower end of the interval of the mean; NaN where values are bounds.
        high: upper end.
        used: cells (seed × sample) that have a value.
        count: cells in all.
        bounds: how many of ``used`` are bounds: with any, exposure is at least what the
            mean says.
    """

    scheme: str
    mean: float
    low: float
    high: float
    used: int
    count: int
    bounds: int = 0


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

    def written(self, group: Ranked) -> str:
        """Its mean in words; of bounds with the sign of one."""
        return sign_of_bound(number(group.mean), group.bounds > 0, self.quantity.sign)

    def without_intervals(self, why: str) -> Verdict:
        """The same means, where too little is known to tell any of them apart.

        Args:
            why: a sentence for the notes.
        """
        plain = (replace(r, low=math.nan, high=math.nan) for r in self.ranked)
        return replace(
            self, ranked=tuple(plain), apart=frozenset(), notes=(*self.notes, why)
        )

    def __str__(self) -> str:
        unit = f" {self.quantity.unit}" if self.quantity.unit else ""
        lines = [f"{self.quantity.name}, most exposed first: {self.order or '–'}"]
        lines += [
            f"  {r.scheme}: {self.written(r)}{unit} "
            f"[{_end(r.low)}, {_end(r.high)}], {r.used} of {r.count}"
            for r in self.ranked
        ]
        lines += [
            f"  {r.scheme}: not known, which is not safe; {r.used} of {r.count} values"
            for r in self.unknown
        ]
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


def rank(
    values: _Array,
    schemes: Sequence[str],
    quantity: Quantity,
    *,
    log: bool,
    level: float = 0.95,
    resamples: int = 4000,
    notes: Sequence[str] = (),
    bounds: npt.NDArray[np.bool_] | None = None,
) -> Verdict:
    """Rank groups by how exposed a quantity says that they are.

    Two groups are told apart when the interval of the difference of their means, over
    the same samples, excludes zero. Intervals are widened as Student's t is for as
    few seeds, or samples, as there are. A group with bounds is never told apart from
    one that seems more exposed: it may be as exposed, or more.

    Args:
        values: ``(schemes, seeds, samples)``, logarithms to base 10 if ``log``.
        schemes: names.
        quantity: what the values are; its direction says which end is exposed.
        log: whether means are to be raised to powers of 10.
        level: coverage of intervals, in (0, 1).
        resamples: of the bootstrap.
        notes: to add to those made here.
        bounds: of which values exposure is at least that, shape of ``values``; none by
            default.

    Raises:
        ValueError: the quantity has no direction, or the level is out of range.

    Example:
        >>> values = np.array([[[1.0, 1.2, 0.9]], [[3.0, 3.1, 3.3]]])
        >>> q = Quantity("q", direction="higher = more exposed")
        >>> found = rank(values, ["a", "b"], q, log=False)
        >>> found.order, found.told_apart("a", "b"), found.notes[0][:8]
        ('b > a', True, 'one seed')
    """
    check_number("level", level, "(0, 1)", example=0.95)
    if quantity.sign == 0:
        raise ValueError(
            f"{quantity.name} does not say by itself which end is more exposed, so it "
            "can't rank; choose another quantity, such as 'i2f_bayes_psnr'."
        )
    _, seeds, samples = values.shape
    draws = resampled_means(values, resamples=resamples)
    present = ~np.isnan(values)
    used = present.sum((1, 2))
    some = (
        np.zeros(len(values), int) if bounds is None else (present & bounds).sum((1, 2))
    )
    means = [
        float(np.nanmean(v)) if n else math.nan
        for v, n in zip(values, used, strict=True)
    ]
    groups = []
    for i, (scheme, mean) in enumerate(zip(schemes, means, strict=True)):
        ends = widened_interval(draws[i], mean, level, _degrees(seeds, samples, 1))
        centre, low, high = (10.0**v if log else v for v in (mean, *ends))
        group = Ranked(scheme, centre, low, high, int(used[i]), seeds * samples)
        if some[i]:
            # What lies above a bound is not known.
            group = replace(group, low=math.nan, high=math.nan, bounds=int(some[i]))
        groups.append(group)
    places = [i for i, g in enumerate(groups) if g.used > _KNOWN * g.count]
    places.sort(key=lambda i: -quantity.sign * groups[i].mean)
    pairs = [(i, j) for place, i in enumerate(places) for j in places[place + 1 :]]
    shared = 1 - (1 - level) / max(len(pairs), 1)
    apart = set()
    for i, j in pairs:
        ends = widened_interval(
            draws[i] - draws[j],
            means[i] - means[j],
            shared,
            _degrees(seeds, samples, 2),
        )
        # j seems less exposed, and may be more so where its values are bounds.
        if (ends[0] > 0 or ends[1] < 0) and not groups[j].bounds:
            apart.add(frozenset((schemes[i], schemes[j])))
    return Verdict(
        quantity=quantity,
        ranked=tuple(groups[i] for i in places),
        apart=frozenset(apart),
        unknown=tuple(g for i, g in enumerate(groups) if i not in places),
        level=level,
        notes=(*_limits(seeds, samples), *_of_bounds(groups), *notes),
    )


def _degrees(seeds: int, samples: int, groups: int) -> int:
    """Degrees of freedom of the spread: those of the factor that has fewer.

    Samples are the same in all groups, seeds are not.
    """
    degrees = [groups * (seeds - 1), samples - 1]
    return min((d for d in degrees if d > 0), default=0)


def _limits(seeds: int, samples: int) -> list[str]:
    if seeds * samples == 1:
        return ["one seed and one sample: nothing can be told apart."]
    limits = []
    if seeds == 1:
        limits.append("one seed: this compares these weights, not the initialisations.")
    if samples == 1:
        limits.append("one sample: intervals leave out how much samples differ.")
    return limits


def _of_bounds(groups: Sequence[Ranked]) -> list[str]:
    some, used = sum(g.bounds for g in groups), sum(g.used for g in groups)
    if not some:
        return []
    names = ", ".join(g.scheme for g in groups if g.bounds)
    return [f"{some} of {count(used, 'value')} ({names}) are bounds; {NO_RANKS}."]


def _end(value: float) -> str:
    return "not known" if math.isnan(value) else number(value)


def resampled_means(
    values: npt.ArrayLike, *, resamples: int = 4000, seed: int = 0
) -> _Array:
    """Means of several groups under resampled seeds and samples.

    All groups saw the same samples, so that a resample holds the same samples in each;
    seeds are drawn anew for each group. Of n seeds, and of n samples, n − 1 are drawn,
    with replacement: then the variance of the means is the unbiased s²/n, where n draws
    give (n − 1)/n of it, two thirds for three seeds (Rao & Wu, 1988). A factor with one
    entry adds no spread.

    Args:
        values: ``(groups, seeds, samples)``; NaN where there is no value.
        resamples: how many.
        seed: of the resampling.

    Returns:
        ``(groups, resamples)``; NaN where a resample has no value.

    Raises:
        ValueError: if ``values`` has another number of dimensions or is empty.

    Example:
        >>> draws = resampled_means(np.zeros((2, 3, 4)) + [[[1.0]], [[5.0]]])
        >>> draws.shape, float(draws[0].max()), float(draws[1].min())
        ((2, 4000), 1.0, 5.0)
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 3 or data.size == 0:
        raise ValueError(
            f"values must be (groups, seeds, samples) and not empty, got shape "
            f"{data.shape}."
        )
    groups, seeds, samples = data.shape
    random = np.random.default_rng(seed)
    of_samples = _counts(random, samples, (resamples,))
    of_seeds = _counts(random, seeds, (groups, resamples))
    present = ~np.isnan(data)
    filled = np.where(present, data, 0.0)
    pick = "gbs,bx,gsx->gb"
    total = np.einsum(pick, of_seeds, of_samples, filled, optimize=True)
    weight = np.einsum(
        pick, of_seeds, of_samples, present.astype(np.float64), optimize=True
    )
    means: _Array = np.where(
        weight > 0, total / np.where(weight > 0, weight, 1), np.nan
    )
    return means


def widened_interval(
    draws: _Array, centre: float, level: float, degrees: int
) -> tuple[float, float]:
    """The central part of resampled values, widened as Student's t is for few units.

    Percentiles of a bootstrap take the spread as known. It was estimated from
    ``degrees`` + 1 units, so both ends move away from the centre by the ratio of the
    quantiles of t and of the normal distribution.

    Args:
        draws: ``(resamples,)``.
        centre: the value of which they are resamples.
        level: coverage, in (0, 1).
        degrees: of freedom, at least 1; 0 for no interval.

    Returns:
        Both ends; NaN where half of the draws or more are.

    Example:
        >>> low, high = widened_interval(np.arange(101.0), 50.0, 0.9, 10**6)
        >>> round(low, 3), round(high, 3)
        (5.0, 95.0)
    """
    present = draws[~np.isnan(draws)]
    if degrees < 1 or 2 * len(present) <= len(draws):
        return float("nan"), float("nan")
    tail = (1 - level) / 2
    wider = float(stdtrit(degrees, 1 - tail) / ndtri(1 - tail))
    low, high = np.quantile(present, [tail, 1 - tail])
    return (
        centre + wider * (float(low) - centre),
        centre + wider * (float(high) - centre),
    )


def _counts(random: np.random.Generator, n: int, shape: tuple[int, ...]) -> _Array:
    """How often each of n is drawn, among max(n − 1, 1)."""
    counts = random.multinomial(max(n - 1, 1), np.full(n, 1 / n), shape)
    return np.asarray(counts, dtype=np.float64)

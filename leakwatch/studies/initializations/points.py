"""What a comparison of initialisations measured, one value at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from leakwatch.reporting.ledger.rows import is_bound, is_usable
from leakwatch.reporting.quantities import Quantity

Moment = Literal["initial", "trained"]

_Array = npt.NDArray[np.float64]


@final
@dataclass(frozen=True)
class Point:
    """One value of one sample under one set of weights.

    Attributes:
        scheme: name of the initialisation.
        seed: of the weights.
        moment: ``"initial"`` or ``"trained"``.
        sample: data-set index.
        label: class.
        quantity: name of a score, ``<attack>_mse``, …
        value: NaN where there is none.
        status: as everywhere: ``"ok"`` or ``"<word>: <reason>"``.
        repeat: which run of an attack; ``None`` for scores.
        matched: whether the attack matched the gradient. One that did not has failed,
            which does not say that the sample is safe; ``None`` for scores.
    """

    scheme: str
    seed: int
    moment: Moment
    sample: int
    label: int
    quantity: str
    value: float
    status: str = "ok"
    repeat: int | None = None
    matched: bool | None = None

    @property
    def usable(self) -> bool:
        """Whether the value may be read as a number."""
        return is_usable(self.value, self.status)

    @property
    def bound(self) -> bool:
        """Whether exposure is at least that, and maybe more."""
        return self.usable and is_bound(self.status)

    def row(self) -> dict[str, object]:
        """The fields by name, NaN as ``None``: JSON has no NaN."""
        row = asdict(self)
        if math.isnan(self.value):
            row["value"] = None
        return row


def logarithmic(quantity: Quantity) -> bool:
    """Whether values are averaged as logarithms: all but decibels, bits and counts.

    Eigenvalues and errors spread over decades, where one sample makes the mean.
    """
    return not quantity.logarithmic and quantity.unit not in ("bit", "directions")


def cells(
    points: Iterable[Point],
    schemes: Sequence[str],
    seeds: Sequence[int],
    samples: Sequence[int],
    *,
    log: bool,
) -> _Array:
    """Values by scheme, seed and sample, averaged over repeats.

    Args:
        points: of one quantity at one moment.
        schemes: the first dimension.
        seeds: the second.
        samples: the third.
        log: whether to take logarithms to base 10 first; values that have none count
            as missing.

    Returns:
        ``(schemes, seeds, samples)``, NaN where nothing is usable.
    """
    places = _places(schemes, seeds, samples)
    repeats: dict[tuple[int, int, int], list[float]] = {}
    for p in points:
        if p.usable and not (log and p.value <= 0):
            place = places[p.scheme, p.seed, p.sample]
            number = math.log10(p.value) if log else p.value
            repeats.setdefault(place, []).append(number)
    out = np.full((len(schemes), len(seeds), len(samples)), math.nan)
    for place, numbers in repeats.items():
        out[place] = sum(numbers) / len(numbers)
    return out


def bounded(
    points: Iterable[Point],
    schemes: Sequence[str],
    seeds: Sequence[int],
    samples: Sequence[int],
) -> npt.NDArray[np.bool_]:
    """Where exposure is at least what `cells` has, and maybe more; the same shape."""
    places = _places(schemes, seeds, samples)
    out = np.zeros((len(schemes), len(seeds), len(samples)), bool)
    for p in points:
        if p.bound:
            out[places[p.scheme, p.seed, p.sample]] = True
    return out


def _places(
    schemes: Sequence[str], seeds: Sequence[int], samples: Sequence[int]
) -> Mapping[tuple[str, int, int], tuple[int, int, int]]:
    return {
        (scheme, seed, sample): (i, j, k)
        for i, scheme in enumerate(schemes)
        for j, seed in enumerate(seeds)
        for k, sample in enumerate(samples)
    }

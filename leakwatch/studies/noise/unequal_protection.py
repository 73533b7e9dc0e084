"""Whom a homogeneous noise protects worst: I²F, Section 5.2."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor, nn

from leakwatch.checks import check_classes, check_number, check_samples
from leakwatch.derivatives import Criterion, Prepare
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.normalization import Channels
from leakwatch.priors import GaussianPrior
from leakwatch.reporting import Quantity, Row, class_bars
from leakwatch.reporting.quantities import class_name
from leakwatch.reporting.words import number
from leakwatch.scores import Value, get, score
from leakwatch.scores.api import PriorName
from leakwatch.scores.measure.gaussian_channel import Channel, noise_for_squared_error
from leakwatch.scores.measure.plan import Solver
from leakwatch.scores.result import judged
from leakwatch.status import Status
from leakwatch.studies.noise.spectra import NoiseResponse, SpectrumKeeper, described

#: The predicted PSNR that risk is told by.
PSNR = "i2f_range_psnr"

_Array = npt.NDArray[np.float64]


@final
@dataclass(frozen=True)
class SampleRisk:
    """One sample under the homogeneous noise.

    Attributes:
        sample: data-set index.
        label: class.
        psnr: predicted PSNR of the best attacker, dB, with its status.
    """

    sample: int
    label: int
    psnr: Value


@final
@dataclass(frozen=True)
class ClassRisk:
    """One class under the homogeneous noise.

    Attributes:
        label: the class.
        count: samples.
        used: samples whose risk is known.
        psnr: mean predicted PSNR, dB; NaN where nothing is known.
        excess: by how much that lies above the mean of all other samples, dB.
        low: lower end of its interval, all classes together at the level.
        high: upper end.
        noise_std: noise that gives this class the mean squared error that all samples
            have on average under the homogeneous noise.
    """

    label: int
    count: int
    used: int
    psnr: float
    excess: float
    low: float
    high: float
    noise_std: Value

    @property
    def under_protected(self) -> bool:
        """Whether the class is more exposed than the others beyond doubt."""
        return self.low > 0


@final
@dataclass(frozen=True, eq=False)
class Unfairness:
    """How unequally one homogeneous noise protects.

    Attributes:
        noise_std: the homogeneous noise.
        samples: all samples, most exposed first, unknown ones before all others.
        classes: all classes, most exposed first, unknown ones before all others.
        level: coverage of the intervals.
        class_names: of the labels, where they are known.
    """

    noise_std: float
    samples: tuple[SampleRisk, ...]
    classes: tuple[ClassRisk, ...]
    level: float
    class_names: tuple[str, ...] | None = None

    @property
    def under_protected(self) -> tuple[int, ...]:
        """Classes that are more exposed than the others beyond doubt."""
        return tuple(c.label for c in self.classes if c.under_protected)

    def rows(self) -> list[Row]:
        """One row of a ledger per sample, as `RiskLedger.append` takes them."""
        return [
            Row(0, 0, s.sample, s.label, PSNR, s.psnr.number, str(s.psnr.status))
            for s in self.samples
        ]

    def figure(self) -> Any:
        """Samples and means by class: a plotly figure, as in I²F, Figure 6.

        Raises:
            ModuleNotFoundError: plotly is not installed.
        """
        about: dict[str, Quantity] = {PSNR: described(get(PSNR))}
        return class_bars(self.rows(), about, self.class_names)

    def __str__(self) -> str:
        numbers = [s.psnr.number for s in self.samples if s.psnr.status.usable]
        lines = [
            f"noise of standard deviation {number(self.noise_std)}: predicted PSNR "
            + (
                f"{min(numbers):.1f} to {max(numbers):.1f} dB"
                if numbers
                else "not known, which is not safe"
            )
            + f", {len(numbers)} of {len(self.samples)} samples known",
            "class     mean dB   above the others [interval]     equalising noise",
        ]
        lines += [self._line(c) for c in self.classes]
        return "\n".join(lines)

    def _line(self, c: ClassRisk) -> str:
        name = class_name(c.label, self.class_names)
        if not c.used:
            return f"{name:<8}  not known, which is not safe"
        interval = (
            "not known"
            if math.isnan(c.low)
            else f"{c.excess:+.1f} [{c.low:+.1f}, {c.high:+.1f}]"
        )
        mark = " under-protected" if c.under_protected else ""
        noise = c.noise_std
        needed = number(noise.number) if noise.status.usable else noise.status.word
        return f"{name:<8}  {c.psnr:7.1f}   {interval:<28}  {needed}{mark}"


def unfairness(
    module: nn.Module,
    x: Float[Tensor, "n ..."],
    y: Int[Tensor, " n"],
    noise_std: float,
    *,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float = 1.0,
    prior_std: float | None = None,
    prior_mean: Float[Tensor, "*sample"] | None = None,
    prior: PriorName | GaussianPrior | None = None,
    solver: Solver = "auto",
    dtype: torch.dtype = torch.float32,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    index: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    level: float = 0.95,
) -> Unfairness:
    """Says whom one Gaussian noise on all gradients protects worst.

    I²F (Zhang et al., NeurIPS 2023), Section 5.2, with the predicted PSNR of an
    attacker who knows the range of pixels (``i2f_range_psnr``; ``i2f_bayes_psnr`` where
    it is not known) in place of the error of one attack. A class is under-protected
    when the interval of its mean minus that of all other samples lies above zero:
    Student's t with the spread within classes, taken to be the same in all, which needs
    several samples a class; the intervals of all classes hold together (Bonferroni).

    Args:
        module: the network; left as it was.
        x: samples, network inputs.
        y: class indices.
        noise_std: the homogeneous noise on each entry of the gradient.
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it.
        data_range: peak of the PSNR, pixel units.
        prior_std: R, pixel units; see :func:`leakwatch.score`, like the next three.
        prior_mean: μ, pixel units.
        prior: what attackers know of images.
        solver: of the spectrum.
        dtype: arithmetic.
        criterion: the same.
        prepare: the same.
        parameters: which are shared.
        index: data-set indices. Default: 0, 1, 2, …
        class_names: for tables and figure.
        level: coverage, in (0, 1).

    Returns:
        Samples and classes, most exposed first.

    Raises:
        ValueError: for bad arguments; quotes them.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2))
        >>> found = unfairness(net, torch.rand(6, 4), torch.tensor([0, 1] * 3), 1e-2)
        >>> sorted(c.label for c in found.classes), len(found.samples)
        ([0, 1], 6)
    """
    check_number("noise_std", noise_std, example=1e-2)
    check_number("level", level, "(0, 1)", example=0.95)
    check_samples(x, y)
    check_classes(y, "unfairness")
    keeper = SpectrumKeeper()
    result = score(
        module,
        x,
        y,
        [keeper.score],
        noise_std=noise_std,
        mean=mean,
        std=std,
        data_range=data_range,
        prior_std=prior_std,
        prior_mean=prior_mean,
        prior=prior,
        solver=solver,
        dtype=dtype,
        criterion=criterion,
        prepare=prepare,
        parameters=parameters,
    )
    labels = y.tolist()
    names = range(len(x)) if index is None else index
    spectra = keeper.of(result)
    values = [spectrum.psnr(noise_std) for spectrum in spectra]
    samples = [SampleRisk(*row) for row in zip(names, labels, values, strict=True)]
    risks = _classes(samples, spectra, noise_std, level)
    return Unfairness(
        noise_std=noise_std,
        samples=tuple(sorted(samples, key=lambda s: _first(s.psnr.number))),
        classes=tuple(sorted(risks, key=lambda c: _first(c.psnr))),
        level=level,
        class_names=None if class_names is None else tuple(class_names),
    )


def _first(psnr: float) -> float:
    """Order: unknown values, then the highest."""
    return -math.inf if math.isnan(psnr) else -psnr


def _classes(
    samples: Sequence[SampleRisk],
    spectra: Sequence[NoiseResponse],
    noise_std: float,
    level: float,
) -> list[ClassRisk]:
    psnr = np.array([s.psnr.number for s in samples])
    label = np.array([s.label for s in samples])
    measured = ~np.isnan(psnr)
    everyone = _pooled(spectra)
    labels = sorted(set(label.tolist()))
    shared, within = 1 - (1 - level) / len(labels), _within(psnr, label)
    out = []
    for c in labels:
        inside, others = psnr[(label == c) & measured], psnr[(label != c) & measured]
        excess, low, high = _difference(inside, others, within, shared)
        out.append(
            ClassRisk(
                label=c,
                count=int((label == c).sum()),
                used=len(inside),
                psnr=float(inside.mean()) if len(inside) else math.nan,
                excess=excess,
                low=low,
                high=high,
                noise_std=_equalising(
                    [s for s, of in zip(spectra, label, strict=True) if of == c],
                    everyone,
                    noise_std,
                ),
            )
        )
    return out


def _within(psnr: _Array, label: npt.NDArray[np.int64]) -> tuple[float, int]:
    """Standard deviation within classes, and its degrees of freedom."""
    groups = [psnr[(label == c) & ~np.isnan(psnr)] for c in np.unique(label)]
    degrees = sum(max(len(g) - 1, 0) for g in groups)
    if degrees == 0:
        return math.nan, 0
    squares = sum(float(((g - g.mean()) ** 2).sum()) for g in groups if len(g))
    return math.sqrt(squares / degrees), degrees


def _difference(
    inside: _Array, others: _Array, within: tuple[float, int], level: float
) -> tuple[float, float, float]:
    """Difference of two means with its interval by Student's t."""
    if not len(inside) or not len(others):
        return math.nan, math.nan, math.nan
    excess = float(inside.mean() - others.mean())
    spread, degrees = within
    if degrees == 0:
        return excess, math.nan, math.nan
    reach = float(stdtrit(degrees, (1 + level) / 2))
    reach *= spread * math.sqrt(1 / len(inside) + 1 / len(others))
    return excess, excess - reach, excess + reach


def _pooled(spectra: Sequence[NoiseResponse]) -> Channel | None:
    """One channel whose mean squared error is the mean over samples."""
    channels = [c for s in spectra if (c := s.channel) is not None]
    if not channels:
        return None
    gain, least, most, weight = (
        torch.cat([getattr(c, name) for c in channels])
        for name in ("gain", "least", "most", "weight")
    )
    return Channel(gain, least, most, weight / len(channels), None)


def _equalising(
    spectra: Sequence[NoiseResponse], everyone: Channel | None, noise_std: float
) -> Value:
    ours = _pooled(spectra)
    if ours is None or everyone is None:
        why = next((s.status.reason for s in spectra if s.status.reason), "")
        return Value(
            math.nan,
            Status("not computed", why or "it needs whole spectra: solver='exact'"),
        )
    wanted = everyone.squared_error(everyone.gain, noise_std)
    ends = [
        noise_for_squared_error(ours, gain, wanted) for gain in (ours.least, ours.most)
    ]
    number_ = noise_for_squared_error(ours, ours.gain, wanted)
    return judged(number_, min(ends), max(ends), "the smallest eigenvalues")

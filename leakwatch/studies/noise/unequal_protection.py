"""Whom a homogeneous noise protects worst: I²F, Section 5.2."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int
from scipy.special import stdtrit
from torch import Tensor, nn

from leakwatch.derivatives import Criterion
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.scores import Value, score
from leakwatch.scores.measure.gaussian_channel import Channel, noise_for_squared_error
from leakwatch.scores.measure.plan import Solver
from leakwatch.scores.result import judged
from leakwatch.scores.settings import check_positive
from leakwatch.status import Status
from leakwatch.studies.noise.class_risk import PSNR, ClassRisk, SampleRisk, Unfairness
from leakwatch.studies.noise.spectra import NoiseResponse, SpectrumKeeper

_Array = npt.NDArray[np.float64]


def unfairness(
    module: nn.Module,
    x: Float[Tensor, "n ..."],
    y: Int[Tensor, " n"],
    noise_std: float,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    data_range: float = 1.0,
    prior_std: float | None = None,
    solver: Solver = "auto",
    dtype: torch.dtype = torch.float32,
    criterion: Criterion | None = None,
    parameters: ParameterFilter | None = None,
    index: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    level: float = 0.95,
) -> Unfairness:
    """Says whom one Gaussian noise on all gradients protects worst.

    I²F (Zhang et al., NeurIPS 2023), Section 5.2, with the predicted PSNR of the
    Bayesian score in place of the error of one attack. A class is under-protected when
    the interval of its mean minus that of all other samples lies above zero: Student's
    t with the spread within classes, taken to be the same in all, which needs several
    samples a class; the intervals of all classes hold together (Bonferroni).

    Args:
        module: the network; left as it was.
        x: samples, network inputs.
        y: class indices.
        noise_std: the homogeneous noise on each entry of the gradient.
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it.
        data_range: peak of the PSNR, pixel units.
        prior_std: R, pixel units; see :func:`leakwatch.score`.
        solver: the same.
        dtype: arithmetic.
        criterion: the same.
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
    check_positive(noise_std=noise_std)
    if not 0 < level < 1:
        raise ValueError(f"level must lie inside (0, 1), got {level}.")
    keeper = SpectrumKeeper()
    found = score(
        module,
        x,
        y,
        [PSNR, keeper.score],
        noise_std=noise_std,
        mean=mean,
        std=std,
        data_range=data_range,
        prior_std=prior_std,
        solver=solver,
        dtype=dtype,
        criterion=criterion,
        parameters=parameters,
    )
    labels = y.tolist()
    names = range(len(x)) if index is None else index
    values = [
        Value(v, s)
        for v, s in zip(found[PSNR].tolist(), found.status[PSNR], strict=True)
    ]
    samples = [SampleRisk(*row) for row in zip(names, labels, values, strict=True)]
    spectra = keeper.of(found)
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
    known = ~np.isnan(psnr)
    everyone = _pooled(spectra)
    labels = sorted(set(label.tolist()))
    shared, within = 1 - (1 - level) / len(labels), _within(psnr, label)
    out = []
    for c in labels:
        inside, others = psnr[(label == c) & known], psnr[(label != c) & known]
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
    found = [c for s in spectra if (c := s.channel) is not None]
    if not found:
        return None
    gain, least, most, weight = (
        torch.cat([getattr(c, name) for c in found])
        for name in ("gain", "least", "most", "weight")
    )
    return Channel(gain, least, most, weight / len(found), None)


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

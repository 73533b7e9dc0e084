r"""The same channel with a prior: the error of the best possible estimator.

Near x the shared gradient is a linear Gaussian channel, g + J(x' − x) + noise of
standard deviation s. With a Gaussian prior of standard deviation R per pixel around a
mean image, the best estimator's mean squared error is :math:`\sum_i s^2R^2/(s^2 +
\lambda_i R^2)`. It is at most R² d_x, where I²F runs off to infinity, and ε = s²/R² is
what I²F's damping means. An attacker with a sharper prior, a good generator say, can do
better than a Gaussian one.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leakwatch.scores.evidence import Evidence, Settings
from leakwatch.scores.i2f import psnr
from leakwatch.scores.registry import Direction, Need, Score, register
from leakwatch.scores.result import OK, Status, Value


def i2f_bayes(evidence: Evidence, settings: Settings) -> Value:
    """√Σ s²R²/(s²+λ_iR²), the error of the best estimator, in pixel units.

    For one given δ its error vector is, along u_i,
    (R² u_iᵀJᵀδ − s² u_iᵀ(x−μ))/(s² + λ_iR²). With a full prior covariance C:
    √tr (C⁻¹ + H/s²)⁻¹.
    """
    if settings.noise_std is None:
        why = "the Bayesian error for a given delta needs noise_std beside it"
        return Value(float("nan"), Status("not computed", why))
    s = settings.noise_std
    if settings.prior_covariance is not None:
        return _full_covariance(evidence, settings, s)
    r2 = settings.prior_std**2
    if evidence.pulled is not None:
        if evidence.eigenvectors is None:
            return evidence.no_spectrum()
        pulled = evidence.eigenvectors.T @ evidence.pulled
        offset = evidence.eigenvectors.T @ _offset(evidence)
        return evidence.of_spectrum(
            lambda lam: float(
                ((r2 * pulled - s**2 * offset) / (s**2 + lam * r2)).norm()
            ),
            "this error",
        )
    return evidence.of_spectrum(lambda lam: _error(lam, s, r2), "this error")


def i2f_bayes_psnr(evidence: Evidence, settings: Settings) -> Value:
    """Predicted PSNR of the best estimator with a Gaussian prior."""
    return psnr(i2f_bayes(evidence, settings), evidence.d_x, settings.data_range)


def leaked_bits(evidence: Evidence, settings: Settings) -> Value:
    """½ Σ log₂(1 + λ_iR²/s²), information about the image in its noisy gradient."""
    s = _noise(settings)
    if settings.prior_covariance is not None:
        if evidence.eigenvalues is None or evidence.eigenvectors is None:
            return evidence.no_spectrum()
        gain = torch.linalg.eigvalsh(_whitened(evidence, settings)) / s**2
        return Value(_bits(gain))
    r2 = settings.prior_std**2
    return evidence.of_spectrum(lambda lam: _bits(lam * r2 / s**2), "the sum")


def fisher_information_loss(evidence: Evidence, settings: Settings) -> Value:
    """√λ_1/s (Hannun, Guo & van der Maaten 2021)."""
    top = evidence.lambda_max
    return Value(math.sqrt(max(top.number, 0.0)) / _noise(settings), top.status)


def noise_std_for_psnr(evidence: Evidence, settings: Settings) -> Value:
    """The s at which i2f_bayes predicts ``target_psnr``, by bisection.

    Zero when the sample is below the target without noise; undefined when the prior
    alone already gives a better picture than the target.
    """
    r2, n = settings.prior_std**2, evidence.d_x
    wanted = n * settings.data_range**2 * 10 ** (-settings.target_psnr / 10)
    if wanted >= r2 * n:
        best = 20 * math.log10(settings.data_range / settings.prior_std)
        return Value(
            float("nan"),
            Status(
                "undefined",
                f"no noise pushes the prediction below {best:.1f} dB, which the mean "
                f"image alone reaches; ask for a target_psnr above that",
            ),
        )
    return evidence.of_spectrum(lambda lam: _inverted(lam, r2, wanted), "this noise")


def _error(lam: Tensor, s: float, r2: float) -> float:
    return math.sqrt(float((s**2 * r2 / (s**2 + lam * r2)).sum()))


def _bits(gain: Tensor) -> float:
    return float(torch.log1p(gain.clamp_min(0)).sum() / (2 * math.log(2)))


def _inverted(lam: Tensor, r2: float, wanted: float) -> float:
    if float(lam.max()) <= 0 or int((lam <= 0).sum()) * r2 >= wanted:
        return 0.0
    # In log s² the error is monotone; beyond these ends it is constant.
    positive = lam[lam > 0]
    low = math.log(float(positive.min()) * r2) - 80.0
    high = math.log(float(positive.max()) * r2) + 80.0
    for _ in range(200):
        middle = (low + high) / 2
        below = _error(lam, math.exp(middle / 2), r2) ** 2 < wanted
        low, high = (middle, high) if below else (low, middle)
    return math.exp((low + high) / 4)


def _whitened(evidence: Evidence, settings: Settings) -> Tensor:
    """LᵀHL with LLᵀ = C."""
    if evidence.eigenvectors is None or evidence.eigenvalues is None:
        raise RuntimeError("a full prior covariance needs eigenvectors")
    half = evidence.eigenvectors * evidence.eigenvalues.clamp_min(0).sqrt()
    image = _cholesky(settings, half.device).T @ half
    return image @ image.T


def _full_covariance(evidence: Evidence, settings: Settings, s: float) -> Value:
    if evidence.eigenvectors is None or evidence.eigenvalues is None:
        return evidence.no_spectrum()
    chol = _cholesky(settings, evidence.eigenvectors.device)
    inner = _whitened(evidence, settings) / s**2
    inner.diagonal().add_(1.0)
    factor = torch.linalg.cholesky(inner)
    if evidence.pulled is None:
        # tr L inner⁻¹ Lᵀ = ‖factor⁻¹ Lᵀ‖²
        half = torch.linalg.solve_triangular(factor, chol.T, upper=False)
        return Value(float(half.norm()))
    offset = _offset(evidence)[:, None]
    towards = chol.T @ evidence.pulled[:, None] / s**2
    towards = towards - torch.linalg.solve_triangular(chol, offset, upper=False)
    return Value(float((chol @ torch.cholesky_solve(towards, factor)).norm()), OK)


def _cholesky(settings: Settings, device: torch.device) -> Tensor:
    if settings.prior_covariance is None:
        raise RuntimeError("no prior covariance")
    return torch.linalg.cholesky(settings.prior_covariance.to(device, torch.float64))


def _offset(evidence: Evidence) -> Tensor:
    if evidence.offset is None:
        raise RuntimeError("the error for one given delta needs the prior mean")
    return evidence.offset


def _noise(settings: Settings) -> float:
    if settings.noise_std is None:
        raise ValueError("the Bayesian scores need noise_std > 0")
    return settings.noise_std


def _score(
    compute: Callable[[Evidence, Settings], Value],
    needs: set[Need],
    unit: str,
    meaning: str,
    source: str,
    direction: Direction,
    *groups: str,
) -> None:
    register(
        Score(compute.__name__, compute, frozenset(needs), unit, direction, meaning, source),
        *groups,
    )


_score(
    i2f_bayes_psnr,
    {"spectrum", "noise"},
    "dB",
    "PSNR that the best attacker with a Gaussian image prior is predicted to reach.",
    "Bayesian form of I²F (linear Gaussian channel)",
    "higher = more exposed",
    "i2f",
    "bayes",
)
_score(
    i2f_bayes,
    {"spectrum", "noise"},
    "pixel (norm over the image)",
    "Predicted recovery error of the best attacker with a Gaussian image prior.",
    "Bayesian form of I²F (linear Gaussian channel)",
    "higher = less exposed",
    "i2f",
    "bayes",
)
_score(
    leaked_bits,
    {"spectrum", "noise"},
    "bit",
    "Information about the image that its noisy gradient carries.",
    "mutual information of the linear Gaussian channel",
    "higher = more exposed",
    "bayes",
)
_score(
    fisher_information_loss,
    {"lambda_max", "noise"},
    "1 / pixel",
    "Worst-direction sensitivity over noise; 1/this bounds an unbiased attacker's error.",
    "Hannun, Guo & van der Maaten, UAI 2021",
    "higher = more exposed",
    "bayes",
)
_score(
    noise_std_for_psnr,
    {"spectrum"},
    "gradient",
    "Gaussian noise that holds this sample to the target predicted PSNR.",
    "inverse of i2f_bayes",
    "higher = more exposed",
    "bayes",
)

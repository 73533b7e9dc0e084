"""I²F: how far noise on the gradient moves the best possible reconstruction.

Zhang et al., "Understanding Deep Gradient Leakage via Inversion Influence Functions",
NeurIPS 2023. The paper writes J for our Jᵀ. All are recovery errors, in pixel units, of
an attacker that inverts the linearised gradient exactly: large means less exposed.

For Gaussian noise of standard deviation s the numbers are root mean squares over the
noise, in closed form. For one given δ they are the norms for that δ.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from leakwatch.scores.measure.sample_spectrum import SampleSpectrum
from leakwatch.scores.norms import root
from leakwatch.scores.registry import scored
from leakwatch.scores.result import Value, changed_by
from leakwatch.scores.settings import Settings

_i2f = functools.partial(scored, "i2f")
_PAPER = "I²F, Zhang et al., NeurIPS 2023"
_DIRECTIONS = "the directions that the gradient shows least decide, and they"
_NO_JACOBIAN = Value.without(
    "undefined",
    "infinite: the gradient does not depend on the image (H = 0), so there is nothing "
    "to invert",
)
_NO_NOISE = Value.without("not computed", "needs noise_std, or a perturbation delta")


@_i2f(
    needs={"spectrum", "noise"},
    unit="dB",
    direction="higher = more exposed",
    meaning="Quality of the picture predicted for a perfect attacker who knows nothing "
    "about images.",
    source=f"{_PAPER}, Eq. 4, 6",
)
def i2f_psnr(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """Predicted PSNR of the attack: RMSE = i2f/√d_x against the data range."""
    return psnr(i2f(spectrum, settings), spectrum.d_x, settings.data_range)


@_i2f(
    needs={"spectrum", "noise"},
    unit="pixel (norm over the image)",
    direction="higher = less exposed",
    meaning="Recovery error predicted for a perfect attacker who knows nothing about "
    "images.",
    source=f"{_PAPER}, Eq. 4, 6",
)
def i2f(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """‖(H+εI)⁻¹Jᵀδ‖ (Eq. 4, damped as in Sec. 4).

    For Gaussian δ: √(s² Σ λ_i/(λ_i+ε)²), which is Eq. 6 at ε = 0.

    It is undefined where it would be infinite: without damping, when the gradient has
    fewer entries than the image; and where H = 0. With damping, directions that the
    gradient hardly shows (λ_i far below ε) count as *no* error, so a damped I²F can be
    small for an image that can't be recovered; i2f_bayes counts them in full.
    """
    eps = settings.epsilon
    if spectrum.eigenvalues is None and spectrum.sums is None:
        return spectrum.no_spectrum()
    if spectrum.lambda_max.number <= 0:
        return _NO_JACOBIAN
    if eps == 0 and spectrum.rank < spectrum.d_x:
        return Value.without(
            "undefined",
            f"infinite: a gradient of {spectrum.rank} entries can't determine "
            f"{spectrum.d_x} pixels; use i2f_bayes, or a damping epsilon",
        )
    if spectrum.pulled is not None:
        return _given(spectrum, eps)
    if settings.noise_std is None:
        return _NO_NOISE
    s = settings.noise_std
    if spectrum.eigenvalues is None:
        return _from_sums(spectrum, s, eps)
    # Single divisions: λ² leaves the range of float64 late in training.
    return spectrum.of_spectrum(
        lambda lam: _ratio(s * s, lam + eps) * _ratio(lam, lam + eps, at_zero=1.0),
        math.sqrt,
        _DIRECTIONS,
        turning=eps if eps > 0 else None,
    )


def _from_sums(spectrum: SampleSpectrum, s: float, eps: float) -> Value:
    """√(s² Σ λ_i/(λ_i+ε)²) from random starts."""
    if eps > 0:
        return spectrum.of_sums(
            lambda lam: _ratio(s, lam + eps).square(),
            "i2f",
            transform=math.sqrt,
            moment=1,
        )
    if spectrum.lambda_min.status.word == "unresolved":
        return spectrum.lambda_min
    return spectrum.of_sums(lambda lam: _ratio(s * s, lam), "i2f", transform=math.sqrt)


def _given(spectrum: SampleSpectrum, eps: float) -> Value:
    """‖(H+εI)⁻¹Jᵀδ‖ for the δ at hand."""
    if spectrum.eigenvalues is None:
        return spectrum.of_solution(spectrum.inverted, eps)
    if spectrum.eigenvectors is None or spectrum.pulled is None:
        return spectrum.no_spectrum()
    c = (spectrum.eigenvectors.T @ spectrum.pulled).abs()
    error = spectrum.pulled_error
    return spectrum.of_spectrum(
        lambda lam: _ratio(c, lam + eps).square(),
        math.sqrt,
        _DIRECTIONS,
        least=lambda lam: _ratio((c - error).clamp_min(0), lam + eps).square(),
        most=lambda lam: _ratio(c + error, lam + eps).square(),
    )


@_i2f(
    needs={"lambda_max", "trace", "noise"},
    unit="pixel (norm over the image)",
    direction="higher = less exposed",
    meaning="Lower bound of i2f; always holds, often far too small to predict an "
    "attack.",
    source=f"{_PAPER}, Eq. 5",
)
def i2f_lb(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """‖Jᵀδ‖/λ_1, the lower bound of I²F (Eq. 5).

    For Gaussian δ: s √Σλ_i / λ_1, the root mean square of that bound.
    """
    top = spectrum.lambda_max
    nom = i2f_nom(spectrum, settings)
    for part in (top, nom):
        if not part.status.usable:
            return Value(math.nan, part.status)
    if top.number <= 0:
        return _NO_JACOBIAN
    return Value(nom.number / top.number, nom.status)


@_i2f(
    needs={"trace", "noise"},
    unit="gradient² / pixel",
    direction="higher = less exposed",
    meaning="Numerator of i2f_lb: the noise as it arrives at the image. Under equal "
    "noise it is jacobian_norm times noise_std, and that is claimed to mean the "
    "opposite.",
    source=f"{_PAPER}, Sec. 4",
)
def i2f_nom(spectrum: SampleSpectrum, settings: Settings) -> Value:
    """‖Jᵀδ‖, the numerator of the lower bound (Sec. 4); Gaussian: s √Σλ_i."""
    if spectrum.pulled is not None:
        return Value(float(spectrum.pulled.norm()))
    if settings.noise_std is None:
        return _NO_NOISE
    size = root(spectrum.trace)
    return Value(settings.noise_std * size.number, size.status)


def psnr(error: Value, d_x: int, data_range: float) -> Value:
    """Turns an error norm over d_x pixels into a PSNR in dB.

    Args:
        error: ‖x' − x‖ in pixel units.
        d_x: number of pixels times channels.
        data_range: peak value.

    Returns:
        20 log10(range · √d_x / error) with the status of the error, which says in dB
        what rounding may have changed; an error of zero is undefined rather than
        infinite.

    Example:
        >>> psnr(Value(2.8), 784, 1.0).number
        20.0
        >>> from leakwatch.scores.result import judged
        >>> psnr(judged(2.8, 1.6, 4.8, "x"), 784, 1.0).status.reason.split("; ")[0]
        'rounding may have changed it by up to 4.9 dB'
    """
    if not error.status.usable:
        return Value(math.nan, error.status)
    if error.number <= 0:
        return Value.without(
            "undefined", "infinite: the predicted error is zero, a perfect recovery"
        )
    number = 20 * math.log10(data_range * math.sqrt(d_x) / error.number)
    if error.ends is None:
        return Value(number, error.status)
    if error.ends[0] <= 0:
        return Value(number, changed_by("the whole of the error"))
    changed = max(abs(20 * math.log10(end / error.number)) for end in error.ends)
    return Value(number, changed_by(f"{changed:.1f} dB"))


def _ratio(
    numerator: Tensor | float, denominator: Tensor, at_zero: float = math.inf
) -> Tensor:
    """A quotient with a value of its own where the denominator is zero."""
    safe = torch.where(denominator > 0, denominator, 1.0)
    return torch.where(denominator > 0, numerator / safe, at_zero)

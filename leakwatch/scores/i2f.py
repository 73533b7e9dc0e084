"""I²F: how far noise on the gradient moves the best possible reconstruction.

Zhang et al., "Understanding Deep Gradient Leakage via Inversion Influence Functions",
NeurIPS 2023. The paper writes J for our Jᵀ. All are recovery errors, in pixel units, of
an attacker that inverts the linearised gradient exactly: large means less exposed.

For Gaussian noise of standard deviation s the numbers are root mean squares over the
noise, in closed form. For one given δ they are the norms for that δ.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from leakwatch.scores.evidence import Evidence, Settings
from leakwatch.scores.norms import root
from leakwatch.scores.registry import Direction, Need, Score, register
from leakwatch.scores.result import Status, Value


def i2f(evidence: Evidence, settings: Settings) -> Value:
    """‖(H+εI)⁻¹Jᵀδ‖ (Eq. 4, damped as in Sec. 4).

    For Gaussian δ: √(s² Σ λ_i/(λ_i+ε)²), which is Eq. 6 at ε = 0.
    """
    eps = settings.epsilon
    if evidence.pulled is not None:
        if evidence.eigenvectors is None:
            return evidence.no_spectrum()
        c = evidence.eigenvectors.T @ evidence.pulled
        return evidence.of_spectrum(
            lambda lam: _finite_norm(c, lam + eps), "this I²F"
        )
    s = _noise(settings)
    return evidence.of_spectrum(
        lambda lam: _finite_norm(s * lam.sqrt(), lam + eps), "I²F"
    )


def i2f_lb(evidence: Evidence, settings: Settings) -> Value:
    """‖Jᵀδ‖/λ_1, the lower bound of I²F (Eq. 5)."""
    top = evidence.lambda_max
    nom = i2f_nom(evidence, settings)
    if not top.status.usable:
        return Value(float("nan"), top.status)
    if top.number <= 0:
        return Value(float("nan"), _NO_JACOBIAN)
    return Value(nom.number / top.number, nom.status)


def i2f_nom(evidence: Evidence, settings: Settings) -> Value:
    """‖Jᵀδ‖, the numerator of the lower bound (Sec. 4); Gaussian: s √Σλ_i."""
    if evidence.pulled is not None:
        return Value(float(evidence.pulled.norm()))
    size = root(evidence.trace)
    return Value(_noise(settings) * size.number, size.status)


def i2f_psnr(evidence: Evidence, settings: Settings) -> Value:
    """Predicted PSNR of the attack: RMSE = i2f/√d_x against the data range."""
    return psnr(i2f(evidence, settings), evidence.d_x, settings.data_range)


def psnr(error: Value, d_x: int, data_range: float) -> Value:
    """Turns an error norm over d_x pixels into a PSNR in dB.

    Args:
        error: ‖x' − x‖ in pixel units.
        d_x: number of pixels times channels.
        data_range: peak value.

    Returns:
        20 log10(range · √d_x / error) with the status of the error; an error of zero
        is undefined rather than infinite.
    """
    if not error.status.usable:
        return Value(float("nan"), error.status)
    if error.number <= 0:
        return Value(float("nan"), Status("undefined", "the predicted error is zero"))
    return Value(
        20 * math.log10(data_range * math.sqrt(d_x) / error.number), error.status
    )


_NO_JACOBIAN = Status(
    "undefined", "the gradient does not depend on the image (H = 0), nothing to invert"
)


def _finite_norm(numerator: Tensor, denominator: Tensor) -> float:
    """‖numerator/denominator‖ where 0/0 counts as inf: that direction is free."""
    ratio = torch.where(denominator > 0, numerator / denominator, torch.inf)
    return float(ratio.norm())


def _noise(settings: Settings) -> float:
    if settings.noise_std is None:
        raise ValueError("I²F needs noise_std, or a perturbation delta")
    return settings.noise_std


def _score(
    compute: Callable[[Evidence, Settings], Value],
    needs: set[Need],
    unit: str,
    meaning: str,
    where: str,
    direction: Direction = "higher = less exposed",
) -> None:
    register(
        Score(
            name=compute.__name__,
            compute=compute,
            needs=frozenset(needs | {"noise"}),
            unit=unit,
            direction=direction,
            meaning=meaning,
            source=f"I²F, Zhang et al., NeurIPS 2023, {where}",
        ),
        "i2f",
    )


_score(
    i2f_psnr,
    {"spectrum"},
    "dB",
    "PSNR that a perfect attacker without prior knowledge is predicted to reach.",
    "Eq. 4, 6",
    "higher = more exposed",
)
_score(
    i2f,
    {"spectrum"},
    "pixel (norm over the image)",
    "Predicted recovery error of a perfect attacker under the assumed noise.",
    "Eq. 4, 6",
)
_score(
    i2f_lb,
    {"lambda_max", "trace"},
    "pixel (norm over the image)",
    "Lower bound of i2f; always holds, often far too small to predict an attack.",
    "Eq. 5",
)
_score(
    i2f_nom,
    {"trace"},
    "gradient² / pixel",
    "Noise as the image sees it, before inversion.",
    "Sec. 4",
)

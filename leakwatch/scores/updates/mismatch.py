"""What an attacker who takes an update for a gradient overlooks, and its errors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.result import ACCURATE

__all__ = ["Mismatch"]


@final
@dataclass(frozen=True, eq=False)
class Mismatch:
    """What an attacker who takes the update for a gradient at ŵ overlooks.

    Attributes:
        delta: δ = s (w_0 − w_T) − g_ŵ(X), ``(d_θ,)``, float64.
        factor: s = ⟨w_0 − w_T, g_ŵ(X)⟩/‖w_0 − w_T‖², which makes δ smallest.
        gradient: g_ŵ(X), the mean gradient of the client's samples, ``(d_θ,)``,
            float64.
        rounding: what the arithmetic of weights and gradient does to δ, as a norm. That
            of the weights is part of what a client shares.
        uncertainty: the gradient's part, which is an error of δ.
    """

    delta: Float[Tensor, " d_theta"]
    factor: float
    gradient: Float[Tensor, " d_theta"]
    rounding: float
    uncertainty: float = 0.0

    @property
    def doubt(self) -> float:
        """How much of δ may be an error, relative."""
        size = float(self.delta.norm())
        return self.uncertainty / size if size > 0 else math.inf

    @property
    def judged(self) -> bool:
        """Whether δ is accurate, so that each score can tell what its errors do."""
        return self.doubt <= ACCURATE

    @property
    def entry_error(self) -> float:
        """Error of each entry of δ that scores must reckon with.

        0 where δ is mostly error: then its size is all that scores can say, and a bound
        would only hide that it is small.
        """
        return self.uncertainty / math.sqrt(len(self.delta)) if self.judged else 0.0

    @property
    def noise_std(self) -> float:
        """δ's energy per coordinate, √(‖δ‖²/d_θ), and at least that of rounding."""
        size = max(float(self.delta.norm()), self.rounding)
        return size / math.sqrt(len(self.delta))

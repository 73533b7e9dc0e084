"""What is known about one sample when its scores are computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.result import Value, judged
from leakwatch.status import Status

_EPS64 = float(torch.finfo(torch.float64).eps)


@final
@dataclass(frozen=True)
class Precision:
    """How far rounding can have moved the eigenvalues of H = JᵀJ.

    See :func:`leakwatch.spectrum.precision_floor` for the derivation.

    Attributes:
        absolute: error of any eigenvalue, from forming and solving in float64.
        factor: error of any singular value σ = √λ, from the arithmetic of J.
    """

    absolute: float = 0.0
    factor: float = 0.0

    @classmethod
    def of(
        cls, lambda_max: float, size: int, eps: float, rounding: float = 0.0
    ) -> Precision:
        """For an H in float64 from a J whose entries carry rounding errors.

        Args:
            lambda_max: λ_1.
            size: rows of H.
            eps: machine precision of J's arithmetic.
            rounding: error of J as measured, ‖ΔJ‖_F, where there is more than eps.
        """
        top = max(lambda_max, 0.0)
        return cls(
            absolute=(size + math.sqrt(size)) * _EPS64 * top,
            factor=max(eps * math.sqrt(size * top), rounding),
        )

    def scaled(self, by: float) -> Precision:
        """The same for ``by`` · H."""
        return Precision(self.absolute * by, self.factor * math.sqrt(by))

    def bounds(self, eigenvalues: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """The least and the most that each eigenvalue can be.

        Args:
            eigenvalues: descending, at least 0.
            rank: eigenvalues from here on are zero by dimension, so exact.
        """
        if not math.isfinite(self.factor):
            return torch.zeros_like(eigenvalues), torch.full_like(eigenvalues, math.inf)
        width = self.absolute + 2 * self.factor * eigenvalues.sqrt() + self.factor**2
        width = torch.where(torch.arange(len(width)).to(width.device) < rank, width, 0)
        return (eigenvalues - width).clamp_min(0), eigenvalues + width


@final
@dataclass(frozen=True, eq=False)
class Evidence:
    """Everything measured about one sample, in pixel units and float64.

    Attributes:
        d_x: number of input elements.
        loss: the sample's loss.
        grad_norm: ‖g‖.
        lambda_max: largest eigenvalue of H.
        lambda_min: smallest.
        cos_max: largest eigenvalue of the cosine Hessian.
        cos_min: smallest.
        trace: Σ λ_i = ‖J‖²_F.
        eigenvalues: all of them, descending, at least 0; ``None`` when only the ends
            are known.
        precision: what rounding can have done to them.
        rank: min(d_θ, d_x): from here on eigenvalues are exactly zero.
        eigenvectors: input-space singular vectors u_i as columns; only when something
            asked for them.
        pulled: Jᵀδ for a given perturbation δ of the gradient.
        pulled_error: what rounding can have done to it along any u_i.
        offset: x − μ, distance from the prior mean, pixel units.
        why_no_spectrum: why ``eigenvalues`` or ``eigenvectors`` is ``None``.
        failure: why nothing but loss and ‖g‖ could be measured.
        memo: intermediate results that several scores of this sample share.
    """

    d_x: int
    loss: Value
    grad_norm: Value
    lambda_max: Value
    lambda_min: Value
    cos_max: Value
    cos_min: Value
    trace: Value
    eigenvalues: Float[Tensor, " d_x"] | None = None
    precision: Precision = Precision()
    rank: int = 0
    eigenvectors: Float[Tensor, "d_x d_x"] | None = None
    pulled: Float[Tensor, " d_x"] | None = None
    pulled_error: float = 0.0
    offset: Float[Tensor, " d_x"] | None = None
    why_no_spectrum: str = ""
    failure: Status | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    def no_spectrum(self) -> Value:
        """The answer of a score that needs the whole spectrum and has none."""
        return Value.without("not computed", self.why_no_spectrum)

    def of_spectrum(
        self,
        terms: Callable[[Tensor], Tensor],
        total: Callable[[float], float],
        what: str = "the smallest eigenvalues of H",
        *,
        least: Callable[[Tensor], Tensor] | None = None,
        most: Callable[[Tensor], Tensor] | None = None,
        turning: float | None = None,
    ) -> Value:
        """A sum over all eigenvalues, judged by what rounding can have done to them.

        Args:
            terms: eigenvalues ``(d_x,)`` ↦ one term each; monotone, or with a single
                maximum.
            total: sum of the terms ↦ number; increasing.
            what: what the smallest eigenvalues are called in a reason.
            least: lower bound of the terms, when they have errors of their own.
            most: upper bound of them.
            turning: where the maximum of a term is, unless it is monotone.

        Returns:
            The number, ``ok``, ``estimated`` or ``unresolved``; ``not computed``
            without a spectrum.
        """
        if self.eigenvalues is None:
            return self.no_spectrum()
        low, high = self.precision.bounds(self.eigenvalues, self.rank)
        ends = [low, high]
        if turning is not None:
            ends.append(torch.clamp(torch.full_like(low, turning), low, high))
        at_least = torch.stack([(least or terms)(e) for e in ends]).amin(0)
        at_most = torch.stack([(most or terms)(e) for e in ends]).amax(0)
        return judged(
            total(float(terms(self.eigenvalues).sum())),
            total(float(at_least.sum())),
            total(float(at_most.sum())),
            what,
        )

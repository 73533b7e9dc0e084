"""What was measured about one sample: all that its scores are computed from."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.scores.measure.components import Components
from leakwatch.scores.measure.influence_path import InfluencePath
from leakwatch.scores.measure.pixel_range import PixelRange
from leakwatch.scores.result import Value, from_probes, judged
from leakwatch.spectrum import DampedSolution, SpectralMeasure
from leakwatch.spectrum.spectral_measure import Moment
from leakwatch.status import Status

NOT_ASKED: Final = Value.without("not computed", "no score asked for it")
NO_DIRECTION: Final = Value.without(
    "undefined", "the gradient vanishes, so it has no direction"
)
NOT_FINITE: Final = Status(
    "failed", "gradient or Jacobian of this sample is not finite; look for overflow"
)
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
    def of_products(
        cls, lambda_max: float, size: int, eps: float, rounding: float = 0.0
    ) -> Precision:
        """For products with a J whose entries carry rounding errors.

        Args:
            lambda_max: λ_1.
            size: columns of J.
            eps: machine precision of J's arithmetic.
            rounding: error of J as measured, ‖ΔJ‖_F, where there is more than eps.
        """
        return cls(factor=max(eps * math.sqrt(size * max(lambda_max, 0.0)), rounding))

    @classmethod
    def of_matrix(
        cls, lambda_max: float, size: int, eps: float, rounding: float = 0.0
    ) -> Precision:
        """For an H that was formed in float64 from such a J; arguments as above."""
        return cls(
            absolute=(size + math.sqrt(size)) * _EPS64 * max(lambda_max, 0.0),
            factor=cls.of_products(lambda_max, size, eps, rounding).factor,
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
class SampleSpectrum:
    """Everything measured about one sample, in pixel units and float64.

    Each solver fills in what it can tell; what nobody asked for stays ``not computed``.
    Scores read the fields, or sum over the spectrum with :meth:`of_spectrum`,
    :meth:`of_sums` and :meth:`of_solution`. A new measurement is a new field here, and
    the line of a solver that computes it.

    Attributes:
        d_x: number of input elements.
        rank: min(d_θ, d_x): from here on eigenvalues are exactly zero.
        loss_of: finds the sample's loss.
        grad_norm: ‖g‖.
        lambda_max: largest eigenvalue of H.
        lambda_min: smallest.
        cos_max: largest eigenvalue of the cosine Hessian.
        cos_min: smallest.
        trace: Σ λ_i = ‖J‖²_F.
        traces: name of a module → its part of it; empty if that is not known.
        eigenvalues: all of them, descending, at least 0; ``None`` when only the ends
            are known.
        eigenvectors: input-space singular vectors u_i as columns; only when something
            asked for them.
        h: H itself; only when something asked for it.
        components: H along the leading components of the prior, where there is one and
            not all of H.
        why_no_spectrum: why ``eigenvalues`` or ``eigenvectors`` is ``None``.
        precision: what rounding can have done to the eigenvalues.
        sums: the spectrum as sampled by random starts, for sums over it where
            ``eigenvalues`` is ``None``.
        lower: a lower bound of λ_min, where ``sums`` is given.
        pulled: Jᵀδ for a given perturbation δ of the gradient.
        pulled_error: what rounding can have done to it along any u_i.
        offset: x − μ, distance from the prior mean, pixel units; with ``pulled``.
        inverted: (H + εI)⁻¹Jᵀδ for every ε, which it counts in units of scale².
        estimated: the same for δ + J(x − μ), with its distance to x − μ.
        scale: J/J̃, the scale at which the two were computed.
        pixel_range: H, image and noise, for attackers who know the range of pixels;
            or why they are not given.
        path: the Bayesian error for δ, integrated, where it was asked for; or why it
            failed.
        failure: why nothing but loss and ‖g‖ could be measured.
        memo: intermediate results that several scores of this sample share.
    """

    d_x: int = 0
    rank: int = 0
    loss_of: Callable[[], Value] = field(default=lambda: NOT_ASKED)
    grad_norm: Value = NOT_ASKED
    lambda_max: Value = NOT_ASKED
    lambda_min: Value = NOT_ASKED
    cos_max: Value = NOT_ASKED
    cos_min: Value = NOT_ASKED
    trace: Value = NOT_ASKED
    traces: dict[str, float] = field(default_factory=dict)
    eigenvalues: Float[Tensor, " d_x"] | None = None
    eigenvectors: Float[Tensor, "d_x d_x"] | None = None
    h: Float[Tensor, "d_x d_x"] | None = None
    components: Components | None = None
    why_no_spectrum: str = ""
    precision: Precision = Precision()
    sums: SpectralMeasure | None = None
    lower: float = 0.0
    pulled: Float[Tensor, " d_x"] | None = None
    pulled_error: float = 0.0
    offset: Float[Tensor, " d_x"] | None = None
    inverted: DampedSolution | None = None
    estimated: DampedSolution | None = None
    scale: float = 1.0
    pixel_range: PixelRange | Status = NOT_ASKED.status
    path: InfluencePath | Status | None = None
    failure: Status | None = None
    memo: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def failed(cls, status: Status) -> SampleSpectrum:
        """Nothing, and why."""
        return cls.without(Value(math.nan, status), failure=status)

    @classmethod
    def without(cls, value: Value, failure: Status | None = None) -> SampleSpectrum:
        """The same value, which has no number, for all that is read off H."""
        return cls(
            lambda_max=value,
            lambda_min=value,
            cos_max=value,
            cos_min=value,
            trace=value,
            failure=failure,
        )

    def perturbed(
        self,
        pulled: Float[Tensor, " d_x"],
        offset: Float[Tensor, " d_x"] | None,
        largest: float,
        uncertainty: float = 0.0,
    ) -> SampleSpectrum:
        """The same with a given perturbation δ of the gradient.

        Args:
            pulled: Jᵀδ.
            offset: x − μ, pixel units.
            largest: the largest entry of |δ|. Entries of J err independently, so that
                their errors add up as if at random.
            uncertainty: error of each entry of δ; it arrives at uᵢ as σᵢ times itself,
                at most.
        """
        failure = self.failure
        if failure is None and not bool(torch.isfinite(pulled).all()):
            failure = NOT_FINITE
        top = self.lambda_max.number
        arrived = math.sqrt(top) * uncertainty if top > 0 else 0.0
        return replace(
            self,
            pulled=pulled,
            pulled_error=self.precision.factor * largest + arrived,
            offset=offset,
            failure=failure,
        )

    @property
    def loss(self) -> Value:
        """The sample's loss; the network is evaluated when a score asks for it."""
        return self.loss_of()

    @property
    def in_components(self) -> bool:
        """Whether nothing but leading components of the prior was looked at."""
        return (
            self.components is not None
            and self.components.image is not None
            and self.eigenvalues is None
        )

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

    def of_sums(
        self,
        function: Callable[[Tensor], Tensor],
        what: str,
        *,
        transform: Callable[[float], float],
        moment: Moment = 0,
    ) -> Value:
        """A function of Σ f(λ_i), or Σ λ_i g(λ_i), from random starts.

        Args:
            function: f, or g with ``moment=1``; see
                :meth:`leakwatch.spectrum.SpectralMeasure.estimate`.
            what: the quantity, for a reason.
            transform: the sum ↦ number; monotone.
            moment: 1 for sums Σ λ_i g(λ_i).

        Returns:
            The number with its status; ``not computed`` without ``sums``.
        """
        if self.sums is None:
            return self.no_spectrum()
        plain = self.sums.estimate(function, moment=moment)
        rounded = self.sums.estimate(
            function,
            moment=moment,
            spread=lambda nodes: self.precision.bounds(nodes, len(nodes)),
        )
        return from_probes(plain, rounded, what, transform=transform)

    def of_solution(self, solution: DampedSolution | None, epsilon: float) -> Value:
        """The distance that a damped solution has, judged by all of its errors.

        Args:
            solution: ``inverted`` or ``estimated``.
            epsilon: the damping, in units of the eigenvalues of H.
        """
        if solution is None:
            return self.no_spectrum()
        squared = self.scale**2
        damping, lower = epsilon / squared, self.lower / squared
        distance = solution.at(damping, lower)
        error = self.precision.factor / self.scale
        slack = self.pulled_error / squared
        if slack > 0:
            slack *= solution.amplification(damping, lower, self.d_x)
        moved = [solution.at(damping, lower, shift=s).value for s in (-error, error)]
        rounded = judged(
            distance.value,
            max(min(moved) - slack, 0.0),
            max(moved) + slack,
            "the directions that the gradient shows least decide, and they",
        )
        return after_products(rounded, distance.error, solution.products)


def after_products(rounded: Value, error: float, products: int) -> Value:
    """A distance from damped least squares, judged by what the iteration left out.

    Args:
        rounded: the distance, with the status that rounding gives it.
        error: bound of what the iteration has left out.
        products: that it took.
    """
    number = rounded.number
    if not rounded.status.usable or error <= 1e-2 * number:
        return rounded
    reason = (
        f"within {error:.1e} after {products} products (Golub–Kahan, damped least "
        f"squares); raise products"
    )
    word = "estimated" if 2 * error <= number else "not converged"
    return Value(number, Status(word, reason))

"""The spectrum as a few nodes that each stand for a number of eigenvalues."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.spectrum.operators import norm

Function: TypeAlias = Callable[[Tensor], Tensor]
"""An elementwise function of eigenvalues."""

Moment: TypeAlias = Literal[0, 1]


class Estimate(NamedTuple):
    """A number with its two kinds of error.

    Attributes:
        value: the number.
        error: standard error of the random starts.
        low: the least that it can be for the starts that were drawn, given how far the
            quadrature and the arithmetic go.
        high: the most.
    """

    value: float
    error: float
    low: float
    high: float


class QuadratureRule(NamedTuple):
    """Nodes and the weights on them, which add up to 1."""

    nodes: Float[Tensor, " k"]
    weights: Float[Tensor, " k"]


@final
@dataclass(frozen=True, eq=False)
class Probe:
    """What one random start says about the spectrum: two pairs of quadrature rules.

    For the measure μ(λ) of a start z, with z·f(H)z = ∫ f dμ, and for λ dμ.

    Attributes:
        gauss: rules for dμ and λ dμ; below ∫ f when f is completely monotone.
        radau: the same with a node at the lower end, for dμ and λ dμ; above it.
        mean: ∫ λ dμ = ‖Jz‖².
    """

    gauss: tuple[QuadratureRule, QuadratureRule]
    radau: tuple[QuadratureRule, QuadratureRule]
    mean: float

    @classmethod
    def of(
        cls, wide: Float[Tensor, "k k1"], *, closed: bool, lower: float = 0.0
    ) -> Probe:
        """Read the rules off [B_k, β_k e_k] of a bidiagonalisation.

        B_kᵀB_k is the Jacobi matrix of dμ, and the wide matrix W makes that of λ dμ as
        WWᵀ. WᵀW is singular and differs from the next Jacobi matrix of dμ in its last
        entry alone: it is the Gauss–Radau matrix with a node at 0.

        Args:
            wide: the k × (k + 1) matrix.
            closed: whether the subspace is invariant, so that Gauss is exact.
            lower: a lower bound of the eigenvalues, for the fixed node of dμ.
        """
        k = len(wide)
        square = wide[:, :k]
        plain = _right(square)
        left, sigma, _ = torch.linalg.svd(wide, full_matrices=False)
        weighted = QuadratureRule(sigma.square(), left[0].square())
        mean = float(wide[0].square()[0])
        if closed:
            exact = torch.linalg.svd(square)
            weighted = QuadratureRule(exact[1].square(), exact[0][0].square())
            return cls((plain, weighted), (plain, weighted), mean)
        fixed = _right(wide) if lower <= 0 else _fixed(wide, lower)
        return cls((plain, weighted), (fixed, _left_at_zero(wide)), mean)

    def scaled(self, by: float) -> Probe:
        """The same for ``by`` · H."""

        def moved(
            pair: tuple[QuadratureRule, QuadratureRule],
        ) -> tuple[QuadratureRule, QuadratureRule]:
            first, second = (
                QuadratureRule(rule.nodes * by, rule.weights) for rule in pair
            )
            return first, second

        return Probe(moved(self.gauss), moved(self.radau), self.mean * by)


def _right(b: Tensor) -> QuadratureRule:
    """Gauss from B_k; Gauss–Radau with a node at 0 from the wide matrix."""
    rows, columns = b.shape
    _, sigma, right = torch.linalg.svd(b, full_matrices=True)
    nodes = torch.zeros(columns, dtype=torch.float64)
    nodes[:rows] = sigma.square()
    return QuadratureRule(nodes, right[:, 0].square())


def _fixed(wide: Tensor, node: float) -> QuadratureRule:
    """Gauss–Radau for dμ with a node at a positive number below the spectrum."""
    k = len(wide)
    square = wide[:, :k]
    _, sigma, right = torch.linalg.svd(square)
    values = sigma.square()
    node = min(node, 0.999999 * float(values.min()))
    coupling = float(square[-1, -1] * wide[-1, -1])
    extended = torch.zeros(k + 1, k + 1, dtype=torch.float64)
    extended[:k, :k] = square.mT @ square
    extended[k, k - 1] = extended[k - 1, k] = coupling
    tail = (right[:, -1].square() / (values - node)).sum()
    extended[k, k] = node + coupling**2 * float(tail)
    nodes, vectors = torch.linalg.eigh(extended)
    return QuadratureRule(nodes.clamp_min(node), vectors[0].square())


def _left_at_zero(wide: Tensor) -> QuadratureRule:
    """Gauss–Radau for λ dμ with a node at 0."""
    k = len(wide)
    if k == 1:
        return QuadratureRule(torch.zeros(1).double(), torch.ones(1).double())
    above = wide[: k - 1, :k]
    lower = torch.linalg.qr(above.mT, mode="r")[1].mT
    factor = torch.zeros(k, k - 1, dtype=torch.float64)
    factor[: k - 1] = lower
    pivot = float(lower[-1, -1])
    coupling = float(wide[k - 2, k - 1] * wide[k - 1, k - 1])
    factor[-1, -1] = coupling / pivot if pivot else 0.0
    left, sigma, _ = torch.linalg.svd(factor, full_matrices=True)
    nodes = torch.zeros(k, dtype=torch.float64)
    nodes[: k - 1] = sigma.square()
    return QuadratureRule(nodes, left[0].square())


@final
@dataclass(frozen=True, eq=False)
class SpectralMeasure:
    """Σ f(λ_i) of one H, estimated from random starts.

    A start z from the unit sphere of an N-dimensional space has N · E[z·f(H)z] = tr f
    there, and k steps of a bidiagonalisation give z·f(H)z by quadrature with k nodes.
    Gauss and Gauss–Radau rules bracket it when f is completely monotone (1/(λ+ε),
    1/(λ+ε)²) or its negative derivative is (log): Golub and Meurant (2010), chapter 6.
    So the quadrature error is bounded for each start, and the error of having few
    starts is estimated from how they differ.

    Attributes:
        size: n.
        known: eigenvalues whose eigenvectors the starts are orthogonal to.
        probes: one per start, at least two.
        products: products with J and Jᵀ spent.
    """

    size: int
    known: Float[Tensor, " m"]
    probes: tuple[Probe, ...]
    products: int

    def estimate(
        self,
        function: Function,
        *,
        moment: Moment = 0,
        spread: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None,
    ) -> Estimate:
        """Σ f(λ_i), or Σ λ_i g(λ_i).

        Args:
            function: f, elementwise, or g with ``moment=1``; completely monotone or
                the integral of such a function, for the bounds to hold.
            moment: 1 for sums Σ λ_i g(λ_i).
            spread: nodes ↦ the least and the most that each of them can be, given
                rounding.

        Returns:
            The estimate; its value is the middle of the quadrature's bracket if that
            is finite, else the Gauss rule's.
        """
        rules = [self._pooled(kind, moment) for kind in ("gauss", "radau")]
        bounds = [_sum(function(nodes), masses) for nodes, masses in rules]
        value = _middle(*bounds)
        if spread is not None:
            for nodes, masses in rules:
                bounds += [_sum(function(moved), masses) for moved in spread(nodes)]
        error = self._error(function, moment)
        return Estimate(value, error, min(bounds), max(bounds))

    def scaled(self, by: float) -> SpectralMeasure:
        """The same for ``by`` · H."""
        return SpectralMeasure(
            self.size,
            self.known * by,
            tuple(probe.scaled(by) for probe in self.probes),
            self.products,
        )

    def trace(self) -> Estimate:
        """Σλ_i, which has no quadrature error."""
        return self.estimate(torch.ones_like, moment=1)

    def _error(self, function: Function, moment: Moment) -> float:
        """Standard error: of the starts as drawn or, if larger, as theory has it.

        With A = f(H) on N dimensions, N z·Az has the variance
        2N/(N + 2) · (‖A‖²_F − (tr A)²/N), and ‖A‖²_F = Σ f(λ_i)² is a sum over the
        spectrum as well. That is steadier than the spread of a few starts.
        """
        count, n = len(self.probes), self.size - len(self.known)
        if n < 1:
            return 0.0
        each, squares = [], []
        for probe in self.probes:
            nodes, weights = probe.gauss[moment]
            values = function(nodes)
            mass = n * (probe.mean if moment else 1.0)
            each.append(mass * _sum(values, weights))
            full = values.square() * nodes if moment else values.square()
            squares.append(mass * _sum(full, weights))
        mean = sum(each) / count
        drawn = sum((e - mean) ** 2 for e in each) / (count - 1)
        spread = max(sum(squares) / count - mean**2 / n, 0.0)
        return math.sqrt(max(drawn, 2 * n / (n + 2) * spread) / count)

    def _pooled(self, kind: str, moment: Moment) -> tuple[Tensor, Tensor]:
        share = (self.size - len(self.known)) / len(self.probes)
        nodes = [self.known]
        masses = [self.known if moment else torch.ones_like(self.known)]
        for probe in self.probes:
            rule: QuadratureRule = getattr(probe, kind)[moment]
            nodes.append(rule.nodes)
            masses.append(rule.weights * share * (probe.mean if moment else 1.0))
        return torch.cat(nodes), torch.cat(masses)


def _sum(values: Tensor, masses: Tensor) -> float:
    # An infinite value without any mass on it, as at a node 0, counts nothing.
    return float(torch.where(masses > 0, values * masses, 0.0).sum())


def _middle(first: float, second: float) -> float:
    return (first + second) / 2 if math.isfinite(first + second) else first


def gap(probe: Probe, function: Function, moment: Moment) -> float:
    """Relative width of the bracket of ∫ f dμ (or ∫ f λ dμ) for one start."""
    ends = [
        _sum(function(rule.nodes), rule.weights)
        for rule in (probe.gauss[moment], probe.radau[moment])
    ]
    size = min(abs(e) for e in ends)
    return abs(ends[1] - ends[0]) / size if size > 0 else abs(ends[1] - ends[0])


def complement(
    start: Float[Tensor, " n"], vectors: Float[Tensor, "n m"]
) -> Float[Tensor, " n"]:
    """The start as a unit vector orthogonal to ``vectors``; zero if none is left."""
    if vectors.shape[1] >= len(start):
        return torch.zeros_like(start)
    for _ in range(2):
        start = start - vectors @ (vectors.mT @ start)
        start = start / norm(start)
    return start

"""All samples of one client at once: the Jacobian of their mean gradient.

J = ∂g_ŵ(X)/∂X is d_θ × N·d_x with the blocks J_i/N. What an attacker knows of one
sample then includes that he doesn't know the others either.
"""

from __future__ import annotations

import math
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.sample_spectrum import NOT_FINITE, after_products
from leakwatch.scores.result import ACCURATE, Value, judged
from leakwatch.spectrum import (
    DampedSolution,
    FactorOperator,
    as_factor,
    damped,
)
from leakwatch.status import Status

__all__ = ["JointJacobian", "joint_errors"]

_EARLIER = 0.75
# Fewer products may stand still by chance.
_LEAST_PRODUCTS = 20


@final
class JointJacobian:
    """J = ∂g_ŵ(X)/∂X of the samples of one client, from products with their own J_i.

    Satisfies :class:`leakwatch.spectrum.FactorOperator` as a batch of one. Like
    :class:`GradientJacobian` it works with J̃ = J/scale.

    Args:
        jacobian: of the samples.
        along: a unit vector ĝ; products are then those of (I − ĝĝᵀ)J̃, the factor of
            the cosine distance's Hessian.

    Attributes:
        scale: J/J̃.
        batch_size: 1, the client.
        rows: d_θ.
        size: N·d_x.
        dtype: arithmetic of the products.
        device: where they are taken.
    """

    def __init__(
        self,
        jacobian: GradientJacobian,
        along: Float[Tensor, " d_theta"] | None = None,
    ) -> None:
        n, self.rows, d_x = jacobian.shape
        self.batch_size, self.size = 1, n * d_x
        self.dtype, self.device = jacobian.dtype, jacobian.device
        self._each = jacobian.normal()
        top = float(jacobian.scale.max())
        self.scale = top / n
        self._ratio = (jacobian.scale / top).to(jacobian.dtype)[:, None]
        self._along = None if along is None else along.to(self._ratio)[None]

    def forward(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch rows"]:
        """J̃ v, the sum over the samples of what each of them changes."""
        parts = v.view(len(self._ratio), -1).to(self.dtype) * self._ratio
        return self._across(self._each.forward(parts).sum(0, keepdim=True))

    def backward(
        self,
        u: Float[Tensor, "batch rows"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """J̃ᵀ u."""
        across = self._across(u.to(self.dtype))
        parts = self._each.backward(across.expand(len(self._ratio), -1))
        return (parts * self._ratio).view(1, -1)

    def _across(self, u: Tensor) -> Tensor:
        if self._along is None:
            return u
        return u - self._along * (self._along * u).sum(1, keepdim=True)


def joint_errors(
    factor: Tensor | FactorOperator,
    delta: Float[Tensor, " d_theta"],
    offset: Float[Tensor, "n d_x"],
    *,
    scale: float,
    epsilon: float,
    rounding: float = 0.0,
    uncertainty: float = 0.0,
    lower: float = 0.0,
    products: int = 300,
    tol: float = 1e-3,
) -> list[Value]:
    """Reconstruction error of each sample that the best joint estimator makes.

    With a Gaussian prior of standard deviation R around μ and noise of standard
    deviation s, the most probable X differs from the true one by
    e = (H + εI)⁻¹(Jᵀδ − ε(X − μ)), ε = s²/R². With w = e + (X − μ), that is the damped
    least-squares problem of J w = δ + J(X − μ), solved by Golub–Kahan
    bidiagonalisation.

    Args:
        factor: J̃, as a batch of one; a matrix or an operator.
        delta: δ, what the shared vector differs from g(X) by.
        offset: X − μ, pixel units.
        scale: J/J̃.
        epsilon: s²/R², in units of the eigenvalues of H.
        rounding: how far rounding has moved J̃, ‖ΔJ̃‖; at least what its arithmetic
            does to a matrix of this size is assumed.
        uncertainty: error of each entry of δ.
        lower: a lower bound of λ_min of H̃.
        products: most products with J̃, and with J̃ᵀ.
        tol: relative error of all ‖e‖ together at which the iteration stops.

    Returns:
        ‖e_i‖ of each sample, pixel units: ``ok`` by the error bound of the iteration,
        ``estimated`` by that, or when the last quarter of 20 products or more changed
        it by less than 10 %, else ``not converged``; ``failed`` where a product is not
        finite.

    Example:
        >>> import torch
        >>> j = torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]).double()
        >>> e = joint_errors(j, torch.tensor([2.0, 2.0]).double(),
        ...                  torch.zeros(2, 1).double(), scale=1.0, epsilon=1.0)
        >>> [round(value.number, 9) for value in e]  # 2·2/(4 + 1), 2/(1 + 1)
        [0.8, 1.0]
    """
    n = len(offset)
    damping = epsilon / scale**2
    centre = offset.double().view(1, -1)
    operator = as_factor(factor)
    moved = operator.forward(centre.to(operator.dtype)).double()
    b = delta.double()[None] / scale + moved
    least = torch.tensor([lower], dtype=torch.float64)
    solution = damped(
        operator,
        b,
        epsilons=(damping,),
        centre=centre,
        lower=least,
        tol=tol,
        max_matvecs=products,
        keep=True,
    )[0]
    if solution is None:
        return [Value(float("nan"), NOT_FINITE)] * n
    eps = float(torch.finfo(operator.dtype).eps)
    largest = float(delta.abs().max()) / scale
    places = centre.view(n, -1)
    # σ/(σ² + ε) is at most 1/(2√ε), and errors of δ are random.
    reach = 2 * math.sqrt(epsilon)
    arrived = 0.0
    if uncertainty > 0:
        arrived = uncertainty * places.shape[1] ** 0.5 / reach if reach else math.inf
    return _judged(solution, places, damping, rounding, lower, largest, eps, arrived)


def _judged(
    solution: DampedSolution,
    offset: Tensor,
    damping: float,
    rounding: float,
    lower: float,
    largest: float,
    eps: float,
    moved_by_delta: float,
) -> list[Value]:
    n = len(offset)
    top = float(solution.sigma.max()) if solution.products else 0.0
    rounding = max(rounding, eps * offset.numel() ** 0.5 * top)

    def norms(solved: DampedSolution, shift: float = 0.0) -> list[float]:
        error = solved.vector(damping, shift=shift).view(n, -1) - offset
        sizes: list[float] = error.norm(dim=1).tolist()
        return sizes

    # Errors of J̃ᵀδ are random, so every sample gets its part of them.
    slack = rounding * largest
    slack *= solution.amplification(damping, lower, offset.numel()) / n**0.5
    slack += moved_by_delta
    bound = solution.at(damping, lower).error
    before = norms(solution.earlier(round(_EARLIER * solution.products)))
    sizes = (norms(solution, shift) for shift in (0.0, -rounding, rounding))
    values = []
    for number, *moved, earlier in zip(*sizes, before, strict=True):
        rounded = judged(
            number,
            max(min(moved) - slack, 0.0),
            max(moved) + slack,
            "the directions that the gradient shows least decide, and they",
        )
        values.append(_stopped(rounded, bound, earlier, solution.products))
    return values


def _stopped(rounded: Value, bound: float, earlier: float, products: int) -> Value:
    """A value with what stopping early may have left out.

    The bound holds for certain, but is far too large long after the value has settled;
    what the last products changed says so, without certainty.
    """
    value = after_products(rounded, bound, products)
    change = abs(value.number - earlier)
    settled = products >= _LEAST_PRODUCTS and change <= ACCURATE * value.number
    if value.status.word != "not converged" or not settled:
        return value
    percent = 100 * change / value.number
    reason = (
        f"the last quarter of {products} products (Golub–Kahan, damped least squares) "
        f"changed it by {percent:.1g} %; raise products for more"
    )
    return Value(value.number, Status("estimated", reason))

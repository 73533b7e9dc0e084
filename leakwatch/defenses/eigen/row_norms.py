"""Norms of the rows of J, one for each entry of the gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.checks import check_integer, check_number
from leakwatch.defenses.covariance import Diagonal
from leakwatch.defenses.eigen.allocations import Allocation
from leakwatch.defenses.samples import Samples
from leakwatch.derivatives.jacobian import GradientJacobian

__all__ = ["RowNorms", "row_norms"]

# Numbers of J that are formed at a time for exact norms.
_BLOCK = 2**24


@final
@dataclass(frozen=True)
class RowNorms(Allocation):
    r"""Independent noise on each entry with a variance proportional to ‖J_j‖.

    J_j is the row of J of that entry: how far it moves with the image. For independent
    noise the information about the image is :math:`\mathrm{tr}(J^T\Sigma^{-1}J) =
    \sum_j \|J_j\|^2/\Sigma_{jj}`, and the Bayesian Cramér–Rao bound on the mean squared
    error of any estimator, :math:`d_x^2/\mathrm{tr}(J^T\Sigma^{-1}J)` without the
    prior's share, is largest at a given Σ_j Σ_jj = B where the information is least. By
    Cauchy–Schwarz

    .. math:: \Big(\sum_j \|J_j\|\Big)^2 \le
        \sum_j \frac{\|J_j\|^2}{\Sigma_{jj}} \cdot \sum_j \Sigma_{jj}

    with equality where Σ_jj ∝ ‖J_j‖: the norm, not its square. No basis is needed. The
    idea is that of Chen, Gürsoy & Lei (2024).

    Args:
        probes: random sign vectors z for ‖J_j‖² ≈ mean (J z)_j², which is exact in
            expectation with a relative standard deviation below √(2/probes); ``None``:
            exact norms, d_x products.
        floor: entries with a smaller norm than this share of the mean count as if they
            had that, so that an estimate can't leave one bare.
    """

    probes: int | None = 32
    floor: float = 1e-3
    name: ClassVar[str] = "diagonal"
    needs_basis: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.probes is not None:
            check_integer("probes", self.probes)
        check_number("floor", self.floor, "[0, inf)", example=0.0)

    def covariance(self, samples: Samples, total: Float[Tensor, " n"]) -> Diagonal:
        """Σ_jj = B ‖J_j‖/Σ‖J_j‖. See :class:`Allocation`."""
        norms = samples.kept(
            f"row norms from {self.probes} probes",
            lambda: row_norms(samples.jacobian, self.probes),
        )
        raised = torch.maximum(norms, self.floor * norms.mean(1, keepdim=True))
        sums = raised.sum(1, keepdim=True)
        # Where J = 0 there is nothing to hide; it gets the budget that was asked for.
        even = torch.full_like(raised, 1 / raised.shape[1])
        share = torch.where(sums > 0, raised / torch.where(sums > 0, sums, 1.0), even)
        return Diagonal(total[:, None] * share)


def row_norms(
    jacobian: GradientJacobian,
    probes: int | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, "n d_theta"]:
    """‖J_j‖ of each sample.

    Args:
        jacobian: J.
        probes: number of random sign vectors; ``None`` for exact norms from d_x
            products, of which no more than 128 MiB in float64 are formed at a time.
        generator: of the signs. Default: its own, the same every time.

    Returns:
        ``(n, d_θ)``, float64, gradient units per unit of input.

    Example:
        >>> import torch
        >>> from leakwatch import GradientMap
        >>> at = GradientMap(torch.nn.Linear(3, 2), dtype=torch.float64)
        >>> j = GradientJacobian(at, torch.rand(1, 3), torch.tensor([0]))
        >>> torch.testing.assert_close(row_norms(j)[0], j.dense(0).norm(dim=1))
    """
    if probes is None:
        return torch.stack([_exact(jacobian, i) for i in range(jacobian.shape[0])])
    stream = torch.Generator().manual_seed(0) if generator is None else generator
    n, d_theta, d_x = jacobian.shape
    squares = jacobian.scale.new_zeros(n, d_theta)
    for _ in range(check_integer("probes", probes)):
        bits = torch.randint(2, (d_x,), generator=stream, device=stream.device)
        z = (2.0 * bits - 1).to(jacobian.device).expand(n, -1)
        # Before the scale: squares of a confident sample's J leave float32.
        image = jacobian.matvec(z).double() / jacobian.scale[:, None]
        squares += image.square()
    return (squares / probes).sqrt() * jacobian.scale[:, None]


def _exact(jacobian: GradientJacobian, sample: int) -> Tensor:
    j = jacobian
    _, d_theta, d_x = j.shape
    directions = torch.diag(j.input_scale)
    weight = (1 / j.scale[sample]).to(j.dtype)
    squares = j.scale.new_zeros(d_theta)
    at_once = max(1, min(d_x, _BLOCK // d_theta))
    for part in torch.split(directions, at_once):
        rows = j.gradients.dense(j.x[sample], j.y[sample], part, weight)
        squares += rows.double().square().sum(0)
    return squares.sqrt() * j.scale[sample]

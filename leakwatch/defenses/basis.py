"""Directions in which a sample moves its gradient, and how far each can be trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.inputs import check_rows
from leakwatch.jacobian import GradientJacobian
from leakwatch.spectrum import exact

__all__ = ["Basis"]


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """The singular value decomposition J = Σ σ_i v_i u_iᵀ of each sample.

    Only the u_i are kept, d_x² numbers for each sample. Σ c_i v_i = J Σ (c_i/σ_i) u_i
    is one product with J, and all v_iᵀδ are one with Jᵀ.

    A direction is *resolved* when λ_i = σ_i² stands clear of rounding: of the
    eigensolver, of the products, and of what :meth:`GradientJacobian.rounding` finds
    that it did to J. The others are hidden from an attacker with the same arithmetic
    as they are, and v_i = J u_i/σ_i would be noise of no known direction.

    Attributes:
        jacobian: J.
        eigenvalues: λ_i, ``(n, d_x)``, float64, descending, at least 0.
        directions: u_i as columns, ``(n, d_x, d_x)``, float64.
        resolved: ``(n, d_x)``.
    """

    jacobian: GradientJacobian
    eigenvalues: Float[Tensor, "n d_x"]
    directions: Float[Tensor, "n d_x d_x"]
    resolved: Bool[Tensor, "n d_x"]

    @classmethod
    def of(
        cls, jacobian: GradientJacobian, *, max_memory: float | None = None
    ) -> Basis:
        """The exact decomposition, from H = JᵀJ of each sample in turn.

        Cost for each sample: its H, and an eigendecomposition of about 9 d_x³
        operations: a few hundred milliseconds for 28×28, half a minute for 3×32×32.

        Args:
            jacobian: of the samples.
            max_memory: MiB that may be kept of J at a time; default all that it takes.

        Returns:
            The basis. A sample whose H is not finite has no resolved direction.

        Example:
            >>> import torch
            >>> from leakwatch import GradientMap
            >>> at = GradientMap(torch.nn.Linear(3, 2), dtype=torch.float64)
            >>> j = GradientJacobian(at, torch.rand(1, 3), torch.tensor([0]))
            >>> found = Basis.of(j)
            >>> values = torch.linalg.svdvals(j.dense(0)).square()
            >>> torch.testing.assert_close(found.eigenvalues[0], values)
        """
        n, d_theta, d_x = jacobian.shape
        eps = float(torch.finfo(jacobian.dtype).eps)
        values = jacobian.scale.new_zeros(n, d_x)
        vectors = torch.eye(d_x, dtype=values.dtype, device=values.device).repeat(
            n, 1, 1
        )
        resolved = torch.zeros_like(values, dtype=torch.bool)
        for i in range(n):
            h = jacobian.gram(i, max_memory=max_memory).h
            spectrum = exact(h, eigenvectors=True, factor_eps=eps)
            if spectrum.eigenvectors is None or not bool(spectrum.converged.all()):
                continue
            normalised = spectrum.eigenvalues[0].clamp_min(0)
            floor = spectrum.floor[0].clamp_min(jacobian.rounding(i) ** 2)
            resolved[i] = spectrum.resolved[0] & (normalised > floor)
            resolved[i, min(d_theta, d_x) :] = False
            values[i] = normalised * jacobian.scale[i] ** 2
            vectors[i] = spectrum.eigenvectors[0]
        return cls(jacobian, values, vectors, resolved)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.eigenvalues)

    @property
    def visible(self) -> Float[Tensor, "n d_x"]:
        """λ_i, 0 where it is not resolved."""
        return torch.where(self.resolved, self.eigenvalues, 0.0)

    def to_input(self, c: Float[Tensor, "n d_x"]) -> Float[Tensor, "n d_x"]:
        """The a with J a = Σ c_i v_i: Σ (c_i/σ_i) u_i over resolved directions.

        Args:
            c: coefficients, gradient units.

        Returns:
            a, in the units of the input that J is a derivative by.
        """
        check_rows("c", c, tuple(self.eigenvalues.shape))
        return torch.einsum("nij,nj->ni", self.directions, self._over_sigma(c))

    def push(self, c: Float[Tensor, "n d_x"]) -> Float[Tensor, "n d_theta"]:
        """Σ c_i v_i over resolved directions."""
        return self.jacobian.matvec(self.to_input(c))

    def pull(self, u: Float[Tensor, "n d_theta"]) -> Float[Tensor, "n d_x"]:
        """v_iᵀu, 0 where the direction is not resolved, float64."""
        back = self.jacobian.rmatvec(u).double()
        return self._over_sigma(torch.einsum("nij,ni->nj", self.directions, back))

    def singular(self, sample: int) -> Float[Tensor, "k d_theta"]:
        """The resolved v_i of one sample as rows, float64: k · d_θ numbers.

        Args:
            sample: position in the batch.
        """
        j = self.jacobian
        keep = self.resolved[sample]
        u = self.directions[sample][:, keep].T * j.input_scale.double()
        weight = (1 / j.scale[sample]).to(j.dtype)
        rows = j.gradients.dense(j.x[sample], j.y[sample], u, weight).double()
        sigma = self.eigenvalues[sample][keep].sqrt() / j.scale[sample]
        return rows / sigma[:, None]

    def _over_sigma(self, c: Tensor) -> Tensor:
        sigma = torch.where(self.resolved, self.eigenvalues, 1.0).sqrt()
        return torch.where(self.resolved, c.double() / sigma, 0.0)

"""Directions in which a sample moves its gradient, and how far each can be trusted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.checks import check_shape
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.spectrum import exact

__all__ = ["Basis", "Directions"]


@final
@dataclass(frozen=True, eq=False)
class Directions:
    """What the basis of one sample consists of, without its J.

    Attributes:
        eigenvalues: λ_i, float64, descending.
        directions: u_i as columns, float64.
        resolved: which of them.
    """

    eigenvalues: Float[Tensor, " d_x"]
    directions: Float[Tensor, "d_x d_x"]
    resolved: Bool[Tensor, " d_x"]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.size_of(len(self.eigenvalues))

    @staticmethod
    def size_of(d_x: int) -> int:
        """Bytes for so many input elements: 8 d_x² and little else.

        Example:
            >>> Directions.size_of(784) / 2**20  # MiB
            4.6961822509765625
        """
        return 8 * d_x**2 + 9 * d_x


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
        aged: samples whose λ_i, u_i are those of earlier weights, ``(n,)``; ``None``
            for none. Their v_i = J u_i/σ_i with J of now are neither orthogonal nor of
            length 1, and :meth:`to_input` and :meth:`push` scale Σ c_i v_i to the
            length ‖c‖ that it has for a basis of now. `pull` and `singular` don't.
    """

    jacobian: GradientJacobian
    eigenvalues: Float[Tensor, "n d_x"]
    directions: Float[Tensor, "n d_x d_x"]
    resolved: Bool[Tensor, "n d_x"]
    aged: Bool[Tensor, " n"] | None = None

    @classmethod
    def of(
        cls,
        jacobian: GradientJacobian,
        *,
        max_memory: float | None = None,
        earlier: Mapping[int, Directions] | None = None,
    ) -> Basis:
        """The exact decomposition, from H = JᵀJ of each sample in turn.

        Cost for each sample: its H, and an eigendecomposition of about 9 d_x³
        operations: a few hundred milliseconds for 28×28, half a minute for 3×32×32.

        Args:
            jacobian: of the samples.
            max_memory: MiB that may be kept of J at a time; default all that it takes.
            earlier: by position, what is taken from earlier weights and costs nothing.

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
        earlier = earlier or {}
        aged = torch.zeros(n, dtype=torch.bool, device=values.device)
        fresh = [i for i in range(n) if i not in earlier]
        rounding = dict(zip(fresh, jacobian.roundings(fresh), strict=True))
        for i in range(n):
            if i in earlier:
                aged[i] = True
                values[i], vectors[i] = earlier[i].eigenvalues, earlier[i].directions
                resolved[i] = earlier[i].resolved
                continue
            h = jacobian.gram(i, max_memory=max_memory).h
            spectrum = exact(h, eigenvectors=True, factor_eps=eps)
            if spectrum.eigenvectors is None or not bool(spectrum.converged.all()):
                continue
            normalised = spectrum.eigenvalues[0].clamp_min(0)
            floor = spectrum.floor[0].clamp_min(rounding[i] ** 2)
            resolved[i] = spectrum.resolved[0] & (normalised > floor)
            resolved[i, min(d_theta, d_x) :] = False
            values[i] = normalised * jacobian.scale[i] ** 2
            vectors[i] = spectrum.eigenvectors[0]
        return cls(jacobian, values, vectors, resolved, aged if earlier else None)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.eigenvalues)

    def of_sample(self, sample: int) -> Directions:
        """A copy of what it knows of one sample, for later weights.

        Args:
            sample: position in the batch.
        """
        return Directions(
            self.eigenvalues[sample].clone(),
            self.directions[sample].clone(),
            self.resolved[sample].clone(),
        )

    @property
    def visible(self) -> Float[Tensor, "n d_x"]:
        """λ_i, 0 where it is not resolved."""
        return torch.where(self.resolved, self.eigenvalues, 0.0)

    def to_input(self, c: Float[Tensor, "n d_x"]) -> Float[Tensor, "n d_x"]:
        """The a with J a = Σ c_i v_i: Σ (c_i/σ_i) u_i over resolved directions.

        Where directions are ``aged`` it is scaled so that ‖J a‖ = ‖c‖, which takes a
        product with J, and is then linear in c but for its length.

        Args:
            c: coefficients, gradient units.

        Returns:
            a, in the units of the input that J is a derivative by.

        Raises:
            RuntimeError: if J of now takes aged directions to nothing.
        """
        check_shape("c", c, tuple(self.eigenvalues.shape))
        a = torch.einsum("nij,nj->ni", self.directions, self._over_sigma(c))
        return a if self.aged is None else a * self._stretch(self.aged, a, c)[:, None]

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
        if not bool(keep.any()):
            size = j.gradients.size
            return self.eigenvalues.new_zeros(0, size, dtype=torch.float64)
        u = self.directions[sample][:, keep].T * j.input_scale.double()
        weight = (1 / j.scale[sample]).to(j.dtype)
        rows = j.gradients.dense(j.x[sample], j.y[sample], u, weight).double()
        sigma = self.eigenvalues[sample][keep].sqrt() / j.scale[sample]
        return rows / sigma[:, None]

    def _stretch(self, aged: Tensor, a: Tensor, c: Tensor) -> Tensor:
        wanted = torch.where(self.resolved, c.double(), 0.0).norm(dim=1)
        reached = self.jacobian.matvec(a).double().norm(dim=1)
        moving = aged & (wanted > 0)
        lost = moving & ~((reached > 0) & torch.isfinite(reached))
        if bool(lost.any()):
            raise RuntimeError(
                f"the gradient of sample {int(lost.nonzero()[0])} no longer moves "
                f"along the directions that were kept of it, so no noise of the size "
                f"asked for lies in them; use a smaller refresh_every."
            )
        factor = wanted / torch.where(moving, reached, 1.0)
        return torch.where(moving, factor, 1.0)

    def _over_sigma(self, c: Tensor) -> Tensor:
        sigma = torch.where(self.resolved, self.eigenvalues, 1.0).sqrt()
        return torch.where(self.resolved, c.double() / sigma, 0.0)

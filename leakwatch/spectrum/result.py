"""What a solver returns: eigenvalues together with how far each can be trusted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

DEFAULT_TOL = 1e-6
"""Residual, relative to λ_1, at which an eigenvalue counts as converged."""

EPS64 = float(torch.finfo(torch.float64).eps)


def precision_floor(
    scale: Float[Tensor, " batch"],
    size: int,
    arithmetic_eps: float,
    factor_eps: float = 0.0,
) -> Float[Tensor, " batch"]:
    """Return the absolute value below which an eigenvalue means nothing.

    ``floor = λ_1 · (n · eps64 + √n · arithmetic_eps + n · factor_eps²)``; each term
    bounds how far one source of rounding can move an eigenvalue that is really zero:

    - *eigensolver*, always float64: backward stable, so within about n · eps64 · λ_1;
    - *entries or products of H* with relative error e: ΔH is at most e·|H| entry by
      entry, ‖ΔH‖ ≤ e · ‖H‖_F ≤ e · √n · λ_1, and by Weyl no eigenvalue moves further;
    - *entries of a factor J* with relative error e and H = JᵀJ formed in float64: the
      same argument moves the singular values by at most e · √n · σ_1, hence a zero
      eigenvalue to at most e² · n · λ_1.

    Just above the floor a value has its order of magnitude, not digits: a value r
    times the floor is known to about 1/r of itself, or 2/√r where the factor's term
    dominates (an error of J moves λ_i by up to 2 · √(λ_i · floor)).

    Args:
        scale: λ_1 (the largest absolute eigenvalue) of each sample.
        size: n, the number of rows of H.
        arithmetic_eps: relative error of the entries or products of H.
        factor_eps: relative error of the entries of J; 0 when there is no factor.

    Returns:
        The floor of each sample, in the units of the eigenvalues.
    """
    relative = size * EPS64 + math.sqrt(size) * arithmetic_eps + size * factor_eps**2
    return relative * scale


def clamp_rounding(values: Tensor, floor: Tensor) -> Tensor:
    """Set negative values that rounding explains to 0; keep clearly negative ones."""
    return torch.where((values < 0) & (values >= -floor), 0.0, values)


@final
@dataclass(frozen=True, eq=False)
class Spectrum:
    """Eigenvalues of a batch of symmetric operators, with residuals and status.

    A number here is either an eigenvalue with its error bar or NaN. "Not converged"
    and "unresolved" can't be read as "small".

    Attributes:
        eigenvalues: float64, descending in each row; NaN where there is none.
        residuals: ‖Hu − λu‖, absolute, float64. A symmetric operator has an eigenvalue
            within this distance of the reported one.
        converged: whether the residual met the solver's tolerance *and* the value's
            place in the order was established (see the solvers).
        matvecs: number of operator products spent on each sample, int64.
        floor: precision floor (see `precision_floor`), in units of the eigenvalues.
        complete: True when all n eigenvalues are there.
        method: the solver's name.
        eigenvectors: unit columns, float64, in the order of ``eigenvalues``; None when
            they were not asked for.
        smallest: estimate of the smallest eigenvalue by a solver that doesn't compute
            all of them; None, like the next two, when not asked for. Read it through
            ``lambda_min``.
        smallest_residual: its residual, absolute.
        smallest_converged: whether that residual is small *relative to the smallest
            eigenvalue*, or both lie below the floor.

    Example:
        >>> import torch
        >>> from leakwatch.spectrum import exact
        >>> spectrum = exact(torch.diag(torch.tensor([3.0, 1.0, 0.0])))
        >>> spectrum.eigenvalues[0].tolist()
        [3.0, 1.0, 0.0]
        >>> [status.split(":")[0] for status in spectrum.status(0)]
        ['ok', 'ok', 'unresolved']
    """

    eigenvalues: Float[Tensor, "batch k"]
    residuals: Float[Tensor, "batch k"]
    converged: Bool[Tensor, "batch k"]
    matvecs: Int[Tensor, " batch"]
    floor: Float[Tensor, " batch"]
    complete: bool
    method: str
    eigenvectors: Float[Tensor, "batch n k"] | None = None
    smallest: Float[Tensor, " batch"] | None = None
    smallest_residual: Float[Tensor, " batch"] | None = None
    smallest_converged: Bool[Tensor, " batch"] | None = None

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.eigenvalues.shape[0]

    @property
    def resolved(self) -> Bool[Tensor, "batch k"]:
        """Whether each value stands clear of the floor and of its own residual."""
        return _resolved(self.eigenvalues, self.residuals, self.floor[:, None])

    @property
    def lambda_max(self) -> Float[Tensor, " batch"]:
        """λ_1, the largest eigenvalue; its status is that of column 0."""
        return self.eigenvalues[:, 0]

    @property
    def lambda_min(self) -> Float[Tensor, " batch"]:
        """λ_n, the smallest eigenvalue; NaN where it was not computed."""
        return self._last(self.eigenvalues, self.smallest)

    @property
    def lambda_min_residual(self) -> Float[Tensor, " batch"]:
        """Residual of ``lambda_min``, absolute; NaN where it was not computed."""
        return self._last(self.residuals, self.smallest_residual)

    @property
    def lambda_min_converged(self) -> Bool[Tensor, " batch"]:
        """Whether ``lambda_min`` is the smallest eigenvalue and not just a bound."""
        return self._last(self.converged, self.smallest_converged) == 1

    def _last(self, columns: Tensor, estimate: Tensor | None) -> Tensor:
        if self.complete:
            return columns[:, -1]
        if estimate is not None:
            return estimate
        return torch.full_like(self.floor, math.nan)

    @property
    def lambda_min_resolved(self) -> Bool[Tensor, " batch"]:
        """Whether ``lambda_min`` stands clear of the floor and of its residual."""
        return _resolved(self.lambda_min, self.lambda_min_residual, self.floor)

    def status(self, i: int) -> list[str]:
        """Say for each eigenvalue of sample ``i`` whether it may be used.

        Args:
            i: position of the sample in the batch.

        Returns:
            One string per eigenvalue: "ok", or "failed: …", "not converged: …" or
            "unresolved: …" with the reason and what to do.

        Raises:
            IndexError: there is no sample ``i``.
        """
        one = self.at(i)
        return [
            one._describe(value, residual, converged, resolved)
            for value, residual, converged, resolved in zip(
                one.eigenvalues[0].tolist(),
                one.residuals[0].tolist(),
                one.converged[0].tolist(),
                one.resolved[0].tolist(),
                strict=True,
            )
        ]

    def lambda_min_status(self, i: int) -> str:
        """Say whether ``lambda_min`` of sample ``i`` may be used; see ``status``."""
        one = self.at(i)
        if not one.complete and one.smallest is None:
            return f"not computed: {self.method} was not asked for the smallest end"
        return one._describe(
            float(one.lambda_min[0]),
            float(one.lambda_min_residual[0]),
            bool(one.lambda_min_converged[0]),
            bool(one.lambda_min_resolved[0]),
        )

    def _describe(
        self, value: float, residual: float, converged: bool, resolved: bool
    ) -> str:
        products = int(self.matvecs[0])
        if math.isnan(float(self.lambda_max[0])):
            return (
                "failed: a product of the operator was not finite, or the eigensolver "
                "did not converge; look for overflow in the model or use float64"
            )
        if math.isnan(value):
            return (
                f"not converged: no value after {products} products; allow more "
                "products or ask for fewer eigenvalues"
            )
        if not converged:
            return (
                f"not converged: residual {residual:.1e} after {products} products of "
                f"{self.method}, or place in the order not established; allow more "
                "products or use the exact solver"
            )
        if not resolved:
            return (
                f"unresolved: at or below {max(float(self.floor[0]), residual):.1e}, "
                "what rounding leaves of λ_1; use float64 if it matters"
            )
        return "ok"

    def at(self, i: int) -> Spectrum:
        """Return sample ``i`` alone, as a batch of one.

        Raises:
            IndexError: there is no sample ``i``.
        """
        if not -len(self) <= i < len(self):
            raise IndexError(
                f"sample {i} asked for, but the batch has {len(self)}; give a position "
                f"from 0 to {len(self) - 1}"
            )
        return self.select([i])

    def select(
        self, index: Sequence[int] | Int[Tensor, " m"] | Bool[Tensor, " batch"]
    ) -> Spectrum:
        """Return the samples at ``index`` (positions or a mask), in that order."""
        where = torch.as_tensor(index, device=self.eigenvalues.device)
        picked = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in picked.items():
            if isinstance(value, Tensor):
                picked[name] = value[where]
        return Spectrum(**picked)


def _resolved(value: Tensor, residual: Tensor, floor: Tensor) -> Tensor:
    # NaN compares False, so a missing value is unresolved as well.
    return value.abs() > torch.maximum(floor.expand_as(value), residual)

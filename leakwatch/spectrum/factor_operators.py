"""What matrix-free solvers need from a factor J of H = JᵀJ: products with J and Jᵀ."""

from __future__ import annotations

from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from leakwatch.spectrum.operators import as_batch, check_dtype


@runtime_checkable
class FactorOperator(Protocol):
    """A batch of rows × size matrices J, one per sample, known by their products.

    A solver that sees J instead of H = JᵀJ works with singular values σ = √λ, and can
    tell σ_min from zero down to about eps · σ_1. From products with H it is
    √eps · σ_1, because rounding moves every λ by eps · λ_1.
    """

    @property
    def batch_size(self) -> int:
        """Number of samples."""

    @property
    def rows(self) -> int:
        """Number of rows of J."""

    @property
    def size(self) -> int:
        """Number of columns n."""

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of the products: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Where the products are computed."""

    def forward(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch rows"]:
        """Return J v, sample by sample.

        Args:
            v: one vector per sample, in the operator's dtype and device.
            active: samples whose product is wanted, all when None; whatever is
                returned for the others is ignored.
        """

    def backward(
        self,
        u: Float[Tensor, "batch rows"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """Return Jᵀ u, sample by sample; ``active`` as in ``forward``."""


@final
class DenseFactor:
    """Matrices J as an operator.

    Args:
        matrices: (batch, rows, n), float32 or float64. Not copied.

    Raises:
        ValueError: not a batch of non-empty float32 or float64 matrices.
    """

    def __init__(self, matrices: Tensor) -> None:
        shape = tuple(matrices.shape)
        if len(shape) != 3 or 0 in shape:
            raise ValueError(
                f"got a tensor of shape {shape}, expected matrices (rows, n) or "
                "(batch, rows, n), none empty"
            )
        check_dtype(matrices.dtype)
        self._matrices = matrices.detach()

    @property
    def batch_size(self) -> int:
        """Number of samples."""
        return self._matrices.shape[0]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self._matrices.shape[1]

    @property
    def size(self) -> int:
        """Number of columns."""
        return self._matrices.shape[2]

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of the products."""
        return self._matrices.dtype

    @property
    def device(self) -> torch.device:
        """Where the matrices are."""
        return self._matrices.device

    def forward(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch rows"]:
        """Return J v."""
        return torch.bmm(self._matrices, v.unsqueeze(2)).squeeze(2)

    def backward(
        self,
        u: Float[Tensor, "batch rows"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """Return Jᵀ u."""
        return torch.bmm(self._matrices.mT, u.unsqueeze(2)).squeeze(2)


def as_factor(a: Tensor | FactorOperator) -> FactorOperator:
    """Return ``a`` as a factor operator.

    Args:
        a: an operator, or a tensor of shape (rows, n) or (batch, rows, n).

    Returns:
        ``a`` itself, or a `DenseFactor`; a single matrix is a batch of one.

    Raises:
        TypeError: neither a tensor nor an operator.
        ValueError: an empty or integer tensor, or an operator of another arithmetic.

    Example:
        >>> import torch
        >>> as_factor(torch.ones(3, 2)).forward(torch.ones(1, 2)).tolist()
        [[2.0, 2.0, 2.0]]
    """
    if isinstance(a, Tensor):
        return DenseFactor(as_batch(a))
    if not isinstance(a, FactorOperator):
        raise TypeError(
            f"got {type(a).__name__}, expected a tensor (rows, n) or (batch, rows, n), "
            "or an object with batch_size, rows, size, dtype, device, forward(v, "
            "active) and backward(u, active)"
        )
    if min(a.batch_size, a.rows, a.size) < 1:
        raise ValueError(
            f"operator has batch_size {a.batch_size}, rows {a.rows} and size {a.size}, "
            "expected at least 1 of each; leave empty batches out"
        )
    check_dtype(a.dtype)
    return a


def forward(
    factor: FactorOperator,
    v: Float[Tensor, "batch n"],
    active: Bool[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch rows"], Bool[Tensor, " batch"]]:
    """Return J v in the operator's arithmetic, and the samples where it is not finite.

    Rows of inactive and failed samples are zero.

    Raises:
        ValueError: the product has another shape than (batch, rows).
    """
    out = factor.forward(v.to(factor.dtype), active).detach()
    return _checked(out, (factor.batch_size, factor.rows), active, "forward")


def backward(
    factor: FactorOperator,
    u: Float[Tensor, "batch rows"],
    active: Bool[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch n"], Bool[Tensor, " batch"]]:
    """Return Jᵀ u as float64, and the samples where it is not finite; see `forward`."""
    out = factor.backward(u.to(factor.dtype), active).detach()
    found, failed = _checked(out, (factor.batch_size, factor.size), active, "backward")
    return found.to(torch.float64), failed


def _checked(
    out: Tensor, shape: tuple[int, int], active: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    if out.shape != shape:
        raise ValueError(
            f"{name} returned shape {tuple(out.shape)}, expected {shape}: one row per "
            "sample"
        )
    failed = active & ~torch.isfinite(out).all(1)
    # where, not a product with the mask: 0 · NaN is NaN.
    return torch.where((active & ~failed)[:, None], out, 0.0), failed

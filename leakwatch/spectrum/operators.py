"""What solvers need: products with H, or with a factor J of H = JᵀJ, and no more."""

from __future__ import annotations

import math
from typing import Protocol, final, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ASYMMETRY = 1e3
"""Largest |a_ij − a_ji| that counts as rounding, in units of eps · max|a|."""


class BatchOperator(Protocol):
    """A batch of linear maps, one per sample, known by their products."""

    @property
    def batch_size(self) -> int:
        """Number of samples."""

    @property
    def size(self) -> int:
        """Number of columns n."""

    @property
    def dtype(self) -> torch.dtype:
        """Arithmetic of the products: float32 or float64."""

    @property
    def device(self) -> torch.device:
        """Where the products are computed."""


@runtime_checkable
class SymmetricOperator(BatchOperator, Protocol):
    """A batch of symmetric n×n operators, one per sample, known by their products.

    Positive semi-definite operators are what the solvers are for; indefinite ones work
    too, with "largest" meaning algebraically largest (see `power` for its exception).
    An operator may also have a method ``dense()`` that returns (batch, n, n); the
    exact solver then calls it instead of forming the matrix column by column.
    """

    def matvec(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """Return H v, sample by sample.

        Args:
            v: one vector per sample, in the operator's dtype and device.
            active: samples whose product is wanted, all when None; the other rows may
                be skipped, and whatever is returned there is ignored.
        """


@runtime_checkable
class FactorOperator(BatchOperator, Protocol):
    """A batch of rows × size matrices J, one per sample, known by their products.

    A solver that sees J instead of H = JᵀJ works with singular values σ = √λ, and can
    tell σ_min from zero down to about eps · σ_1. From products with H it is
    √eps · σ_1, because rounding moves every λ by eps · λ_1.
    """

    @property
    def rows(self) -> int:
        """Number of rows of J."""

    def forward(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch rows"]:
        """Return J v, sample by sample; ``active`` as in `SymmetricOperator`."""

    def backward(
        self,
        u: Float[Tensor, "batch rows"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """Return Jᵀ u, sample by sample."""


@final
class DenseOperator:
    """Symmetric matrices as an operator.

    Args:
        matrices: (batch, n, n), float32 or float64. Not copied.

    Raises:
        ValueError: not square, not float32 or float64, not finite, or not symmetric
            to rounding.
    """

    def __init__(self, matrices: Tensor) -> None:
        matrices = matrices.detach()
        check_matrices(matrices)
        finite = finite_samples(matrices)
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten().tolist()
            raise ValueError(
                f"matrices of samples {bad} hold NaN or infinity, expected finite "
                "values; remove those samples, or use exact(), which sets them apart"
            )
        check_symmetry(matrices)
        self._matrices = matrices
        self.batch_size, self.size, _ = matrices.shape
        self.dtype, self.device = matrices.dtype, matrices.device

    def matvec(
        self,
        v: Float[Tensor, "batch n"],
        active: Bool[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch n"]:
        """Return H v, zero for inactive samples."""
        product = torch.bmm(self._matrices, v.unsqueeze(2)).squeeze(2)
        if active is None:
            return product
        return torch.where(active[:, None], product, 0.0)

    def dense(self) -> Float[Tensor, "batch n n"]:
        """Return the matrices."""
        return self._matrices


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
        self.batch_size, self.rows, self.size = shape
        self.dtype, self.device = matrices.dtype, matrices.device

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


def as_operator(a: Tensor | SymmetricOperator) -> SymmetricOperator:
    """Return ``a`` as an operator.

    Args:
        a: an operator, or a tensor of shape (n, n) or (batch, n, n).

    Returns:
        ``a`` itself, or a `DenseOperator`; a single matrix is a batch of one.

    Raises:
        TypeError: neither a tensor nor an operator.
        ValueError: a tensor that is not square, float, finite and symmetric, or an
            operator that is empty or of another arithmetic.

    Example:
        >>> import torch
        >>> as_operator(torch.eye(3)).matvec(torch.ones(1, 3)).tolist()
        [[1.0, 1.0, 1.0]]
    """
    if isinstance(a, Tensor):
        return DenseOperator(as_batch(a))
    if not isinstance(a, SymmetricOperator):
        raise TypeError(
            f"got {type(a).__name__}, expected a tensor (n, n) or (batch, n, n), or an "
            "object with batch_size, size, dtype, device and matvec(v, active)"
        )
    _check_operator(a, batch_size=a.batch_size, size=a.size)
    return a


def as_factor(a: Tensor | FactorOperator) -> FactorOperator:
    """Return ``a`` as a factor operator.

    Args:
        a: an operator, or a tensor of shape (rows, n) or (batch, rows, n).

    Returns:
        ``a`` itself, or a `DenseFactor`; a single matrix is a batch of one.

    Raises:
        TypeError: neither a tensor nor an operator.
        ValueError: an empty or integer tensor, or an operator that is empty or of
            another arithmetic.

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
    _check_operator(a, batch_size=a.batch_size, rows=a.rows, size=a.size)
    return a


def _check_operator(operator: BatchOperator, **sizes: int) -> None:
    if min(sizes.values()) < 1:
        stated = ", ".join(f"{name} {number}" for name, number in sizes.items())
        raise ValueError(
            f"operator has {stated}, expected at least 1 of each; leave empty batches "
            "out"
        )
    check_dtype(operator.dtype)


def as_batch(a: Tensor) -> Tensor:
    """Return a matrix or a batch of matrices as a batch."""
    return a.unsqueeze(0) if a.ndim == 2 else a


def check_dtype(dtype: torch.dtype) -> None:
    """Raise ValueError unless ``dtype`` is float32 or float64."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"operator has dtype {dtype}, expected torch.float32 or torch.float64; "
            "convert it with .float() or .double()"
        )


def check_matrices(matrices: Tensor) -> None:
    """Raise ValueError unless shape and dtype are those of a batch of matrices."""
    shape = tuple(matrices.shape)
    if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
        raise ValueError(
            f"got a tensor of shape {shape}, expected square matrices (n, n) or "
            "(batch, n, n), none empty; for a Jacobian J pass J.mT @ J"
        )
    check_dtype(matrices.dtype)


def check_symmetry(matrices: Tensor) -> None:
    """Raise ValueError where a matrix differs from its transpose by more than rounding.

    Args:
        matrices: (batch, n, n); those that are not finite pass.
    """
    allowed_relative = ASYMMETRY * float(torch.finfo(matrices.dtype).eps)
    # One sample at a time, because the difference is as large as the matrix, but one
    # look at the numbers of all.
    numbers = [
        torch.stack([(matrix - matrix.mT).abs().amax(), matrix.abs().amax()])
        for matrix in matrices
    ]
    for i, (gap, peak) in enumerate(torch.stack(numbers).tolist()):
        allowed = allowed_relative * peak
        if math.isfinite(peak) and gap > allowed:
            raise ValueError(
                f"matrix of sample {i} is not symmetric: entries differ by up to "
                f"{gap:.1e} from the transpose, expected at most {allowed:.1e}; pass "
                "(a + a.mT) / 2 if that is what you mean"
            )


def exactly_symmetric(matrices: Float[Tensor, "batch n n"]) -> bool:
    """Return whether all are equal to their transposes, as far as that is seen at once.

    On a GPU a look at numbers costs more than symmetrising: there the answer is no.
    """
    return matrices.device.type == "cpu" and all(
        torch.equal(matrix, matrix.mT) for matrix in matrices
    )


def finite_samples(matrices: Float[Tensor, "batch n n"]) -> Bool[Tensor, " batch"]:
    """Return which matrices have neither NaN nor infinity."""
    ends = [torch.stack(torch.aminmax(matrix)) for matrix in matrices]
    return torch.stack(ends).isfinite().all(1)


def product(
    operator: SymmetricOperator,
    v: Float[Tensor, "batch n"],
    active: Bool[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch n"], Bool[Tensor, " batch"]]:
    """Return H v as float64, and the samples where it is not finite.

    The product is taken in the operator's arithmetic. Rows of inactive and failed
    samples are zero. `forward` and `backward` do the same with the halves J and Jᵀ.

    Args:
        operator: the operator.
        v: one vector per sample.
        active: samples whose product is wanted.

    Raises:
        ValueError: the product has another shape than expected.
    """
    out = operator.matvec(v.to(operator.dtype), active)
    out, failed = _checked(out, tuple(v.shape), active, "matvec")
    return out.to(torch.float64), failed


def forward(
    factor: FactorOperator,
    v: Float[Tensor, "batch n"],
    active: Bool[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch rows"], Bool[Tensor, " batch"]]:
    """Return J v in the operator's arithmetic, and where it failed; see `product`."""
    out = factor.forward(v.to(factor.dtype), active)
    return _checked(out, (factor.batch_size, factor.rows), active, "forward")


def backward(
    factor: FactorOperator,
    u: Float[Tensor, "batch rows"],
    active: Bool[Tensor, " batch"],
) -> tuple[Float[Tensor, "batch n"], Bool[Tensor, " batch"]]:
    """Return Jᵀ u as float64, and where it failed; see `product`."""
    out = factor.backward(u.to(factor.dtype), active)
    out, failed = _checked(out, (factor.batch_size, factor.size), active, "backward")
    return out.to(torch.float64), failed


def _checked(
    out: Tensor, shape: tuple[int, ...], active: Tensor, name: str
) -> tuple[Tensor, Tensor]:
    if out.shape != shape:
        raise ValueError(
            f"{name} returned shape {tuple(out.shape)}, expected {shape}: one row per "
            "sample, whatever in inactive ones"
        )
    out = out.detach()
    # The largest is no number where one of them is none, and found ten times faster.
    failed = active & ~torch.isfinite(out.abs().amax(1))
    # where, not a product with the mask: 0 · NaN is NaN.
    return torch.where((active & ~failed)[:, None], out, 0.0), failed


def norm(x: Tensor, dim: int = -1) -> Tensor:
    """Return the Euclidean norm without over- or underflow of the squares.

    H scales with the square of the loss, so entries of 1e-200 occur late in training.
    """
    peak = x.abs().amax(dim, keepdim=True)
    unit = x / torch.where(peak > 0, peak, 1.0)
    length: Tensor = torch.linalg.vector_norm(unit, dim=dim)
    return length * peak.squeeze(dim)


def orthogonalise(
    w: Float[Tensor, "batch n"], q: Float[Tensor, "batch m n"]
) -> tuple[Float[Tensor, "batch n"], Float[Tensor, "batch m"]]:
    """Return w minus its part in the rows of q, and the coefficients of that part.

    Gram-Schmidt, twice: that is enough also near breakdown (Giraud et al. 2005).
    """
    coefficients = w.new_zeros(q.shape[:2])
    for _ in range(2):
        part = torch.bmm(q, w.unsqueeze(2))
        w = torch.baddbmm(w.unsqueeze(1), part.mT, q, alpha=-1.0).squeeze(1)
        coefficients = coefficients + part.squeeze(2)
    return w, coefficients


def random_vector(size: int, generator: torch.Generator) -> Float[Tensor, " n"]:
    """Draw a float64 Gaussian vector from ``generator``, on the generator's device."""
    return torch.randn(
        size, generator=generator, device=generator.device, dtype=torch.float64
    )


def own_generator(generator: torch.Generator | None) -> torch.Generator:
    """Return ``generator``, or a fresh one that is the same each time.

    It lives on the CPU, so that a GPU run starts from the same vectors, and the global
    random state is not touched: a monitor must not change the training it watches.
    """
    return torch.Generator().manual_seed(0) if generator is None else generator


def random_starts(
    size: int, count: int, generator: torch.Generator
) -> Float[Tensor, "count n"]:
    """Draw unit vectors uniformly from the sphere, float64."""
    drawn = torch.stack([random_vector(size, generator) for _ in range(count)])
    lengths: Tensor = torch.linalg.vector_norm(drawn, dim=1, keepdim=True)
    return drawn / lengths

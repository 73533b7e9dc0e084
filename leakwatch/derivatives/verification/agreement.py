"""Whether a faster way gives what the plain one gives: one policy, one table.

Whoever has two ways to one quantity compares them here. Each row, of a sample or of an
attack, is compared alone: a large one must not hide a small one. Its gap is the norm of
the difference, and may be a share of its size, which depends on the quantity and on the
arithmetic. A gap that is not a number counts as infinite. A reference that is not
finite shows nothing: its row counts as right, and the agreement as not conclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

import torch
from torch import Tensor

__all__ = ["TOLERANCES", "Agreement", "Quantity", "Tolerance", "agreement"]

Quantity: TypeAlias = Literal[
    "derivative",
    "loss in a batch",
    "loss again",
    "layer's factors",
    "activation in a batch",
    "product from a graph",
    "product and its adjoint",
    "attack's gradient",
    "update's gradient",
]


@final
@dataclass(frozen=True)
class Tolerance:
    """By how much two right evaluations of a quantity may be apart.

    Attributes:
        float32: share of its size, in this arithmetic.
        float64: the same.
        why: what the share leaves room for, and what it must not.
        floor: what may be added to that, in units of machine precision; for
            quantities of which a size of about 1 is known.
        order: of the norm that measures gap and size.
    """

    float32: float
    float64: float
    why: str
    floor: float = 0.0
    order: float = 2.0

    def share(self, dtype: torch.dtype) -> float:
        """The share in an arithmetic."""
        return self.float64 if dtype == torch.float64 else self.float32


TOLERANCES: Final[dict[Quantity, Tolerance]] = {
    "derivative": Tolerance(
        1e-4,
        1e-8,
        "torch.func and double backward take the same operations in another order; "
        "what a network makes of rounding beyond that is found by an experiment "
        "(`rounding.Rounding`). The loss is weighed so that ‖g‖ is 1.",
        floor=30,
    ),
    "loss in a batch": Tolerance(
        1e-4, 1e-8, "another batch size has other kernels; the same experiment follows"
    ),
    "loss again": Tolerance(
        1e-4, 1e-10, "two evaluations differ by the order of a device's atomic adds"
    ),
    "layer's factors": Tolerance(
        1e-4,
        1e-4,
        "a weight that is read outside of its layer as well misses a whole term; "
        "rounding, also of float64, stays far below",
    ),
    "activation in a batch": Tolerance(
        1e-3,
        1e-9,
        "the entries of one sample, between which those of another one would stand "
        "out, so by the largest",
        order=math.inf,
    ),
    "product from a graph": Tolerance(
        1e-3, 1e-9, "a network amplifies rounding; J is divided by ‖g‖", floor=1
    ),
    "product and its adjoint": Tolerance(
        1e-5,
        1e-11,
        "one number tells of a gap between vectors about as much as that gap is, and "
        "rarely less than a hundredth; where it is larger, the vectors are compared",
    ),
    "attack's gradient": Tolerance(
        2e-3, 1e-9, "well above rounding, well below any mistake"
    ),
    "update's gradient": Tolerance(
        1e-2, 1e-9, "above rounding, also next to kinks, and below any mistake"
    ),
}


@final
@dataclass(frozen=True)
class Agreement:
    """How two evaluations of a quantity compare.

    Attributes:
        holds: whether they differ by no more than right evaluations may.
        conclusive: False when a row's reference was not finite.
        gap: the largest norm of a row's difference, infinite for what is no number.
        relative: the largest share of a row's size that its gap is.
        reason: what is wrong, for a sentence that begins with the fast way; empty when
            nothing is.
    """

    holds: bool
    conclusive: bool
    gap: float
    relative: float
    reason: str


def agreement(
    fast: Tensor,
    reference: Tensor,
    quantity: Quantity,
    *,
    dtype: torch.dtype | None = None,
    size: Tensor | None = None,
) -> Agreement:
    """Compares a fast way's values with those of the plain way.

    Args:
        fast: values, ``(rows, ...)``.
        reference: what they should be, with as many numbers in each row.
        quantity: what they are, a row of :data:`TOLERANCES`.
        dtype: the arithmetic in which they were found. Default: the reference's type.
        size: what the gap of each row is a share of, ``(rows,)``. Default: the larger
            norm of the two.

    Returns:
        The verdict.

    Example:
        >>> g = torch.ones(2, 3)
        >>> agreement(g + 1e-6, g, "derivative").holds
        True
        >>> agreement(g + 0.1, g, "derivative").reason
        'differs by 9e-02 of its size, where rounding explains 1e-04'
    """
    tolerance = TOLERANCES[quantity]
    kind = reference.dtype if dtype is None else dtype
    share, floor = tolerance.share(kind), tolerance.floor * torch.finfo(kind).eps

    def norm(row: Tensor) -> Tensor:
        flat = row.reshape(-1)
        length: Tensor = torch.linalg.vector_norm(
            flat, tolerance.order, dtype=torch.float64
        )
        return length

    # Row by row, because together the copies in float64 could be as large as J.
    rows = [
        torch.stack((norm(ours - right), norm(ours), norm(right)))
        for ours, right in zip(fast.detach(), reference.detach(), strict=True)
    ]
    gaps, ours, right = torch.stack(rows).T.cpu()
    sizes = torch.maximum(ours, right) if size is None else size.detach().double().cpu()
    shown = torch.isfinite(right)
    gaps = torch.where(shown, gaps.nan_to_num(math.inf, math.inf), 0.0)
    relative = torch.where(gaps > 0, gaps / sizes, 0.0).nan_to_num(math.inf, math.inf)
    close = (gaps <= share * sizes + floor) & torch.isfinite(gaps)
    holds = bool((close | ~shown).all())
    worst = float(relative.max())
    reason = (
        ""
        if holds
        else f"differs by {worst:.0e} of its size, where rounding explains {share:.0e}"
        if math.isfinite(worst)
        else "is not finite"
    )
    return Agreement(holds, bool(shown.all()), float(gaps.max()), worst, reason)

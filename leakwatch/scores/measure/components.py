"""H along the leading components of an image prior: for images too large for all of H.

What people recognise in an image lies in a few hundred components of its statistics:
low frequencies, or principal components of a data set. J along those is a tangent for
each, whatever the size of the image, and well conditioned. Detail in the others keeps
its prior variance: a picture at least as good as that is predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.priors import GaussianPrior

__all__ = ["Components", "leading_components"]

# One after the other is looked at, while it makes a difference.
_COUNTS = (64, 128, 256)
# Decibels by which twice as many components must change a prediction.
_ENOUGH_DB = 0.3
# Part of the error: where less is in what was looked at, all of that is out.
_ALL_OUT = 0.1
# Numbers of columns in float64 that are multiplied at once.
_BLOCK = 2**21


@final
@dataclass(frozen=True, eq=False)
class Components:
    """H and the prior along some components L_k of it, L Lᵀ = C.

    Attributes:
        gram: L_kᵀ H L_k, ``(k, k)``, float64.
        norms: L_kᵀ L_k, ``(k, k)``, pixel units squared.
        rest: tr C − tr L_kᵀL_k, the variance of all others together.
        size: d_x.
    """

    gram: Float[Tensor, "k k"]
    norms: Float[Tensor, "k k"]
    rest: float
    size: int

    @property
    def count(self) -> int:
        """K."""
        return len(self.gram)

    @property
    def share(self) -> float:
        """Part of the prior's variance that the components hold."""
        seen = float(self.norms.diagonal().sum())
        return seen / (seen + self.rest)

    def error(self, noise_std: float) -> float:
        """Mean squared error in these components, pixel units squared."""
        m = self.gram / noise_std**2
        m.diagonal().add_(1)
        return float(torch.linalg.solve(m, self.norms).diagonal().sum())


def leading_components(
    jacobian: GradientJacobian,
    prior: GaussianPrior,
    noise_std: float | None,
    *,
    most: int,
    max_memory: float | None,
) -> list[Components]:
    """H of each sample along the leading components of a prior.

    Args:
        jacobian: of the samples.
        prior: what is known of images.
        noise_std: s, at which the prediction has to settle; ``None``: as many
            components as there may be.
        most: components that may be looked at.
        max_memory: MiB that tangents may take; if they take more, each costs a product
            with Jᵀ too. ``None``: any.
    """
    batch, d_theta, d_x = jacobian.shape
    counts = [min(n, most, d_x) for n in _COUNTS]
    rows = prior.leading(counts[-1])
    scaled = rows.to(jacobian.device, jacobian.dtype) * jacobian.input_scale
    bytes_each = batch * d_theta * jacobian.dtype.itemsize
    kept = max_memory is None or len(rows) * bytes_each <= max_memory * 2**20
    columns: list[Tensor] = []
    grams = jacobian.scale.new_zeros(batch, len(rows), len(rows))
    norms = (rows @ rows.T).to(grams)
    total = prior.std**2 * d_x
    found: list[Components] = []
    before: list[float] | None = None
    done = 0
    for count in dict.fromkeys(counts):
        for j in range(done, count):
            direction = scaled[j].expand(batch, -1)
            if kept:
                columns.append(jacobian.products.push(direction, None))
                continue
            back = jacobian.products.normal(direction, None)
            grams[:, :, j] = (back @ scaled.T).double()
        if kept:
            _extend(grams, columns, done)
        done = count
        part = (grams + grams.mT)[:, :count, :count] / 2
        seen = norms[:count, :count]
        rest = max(total - float(seen.diagonal().sum()), 0.0)
        squared = jacobian.scale.square()[:, None, None]
        found = [Components(one, seen, rest, d_x) for one in part * squared]
        if noise_std is None:
            continue
        errors = [one.error(noise_std) for one in found]
        if before is not None and _settled(before, errors, rest):
            break
        if all(error <= _ALL_OUT * rest for error in errors):
            break
        before = [error + rest for error in errors]
    return found


def _extend(grams: Tensor, columns: Sequence[Tensor], done: int) -> None:
    """Inner products of the new columns with all, in float64, a block at a time."""
    n, every = len(columns), columns[0].shape[1]
    step = max(1, _BLOCK // n)
    for i in range(len(grams)):
        block = grams.new_zeros(n, n - done)
        for start in range(0, every, step):
            part = torch.stack([c[i, start : start + step] for c in columns])
            wide = part.double()
            block.addmm_(wide, wide[done:].T)
        grams[i, :n, done:n] = block
        grams[i, done:n, :n] = block.T


def _settled(before: Sequence[float], errors: Sequence[float], rest: float) -> bool:
    """Whether the last components changed no prediction by much."""
    ratio = 10 ** (_ENOUGH_DB / 10)
    return all(
        math.isfinite(now) and old <= ratio * (now + rest)
        for old, now in zip(before, errors, strict=True)
    )

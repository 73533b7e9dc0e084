r"""What several attempts at the same image are worth where none matched its gradient.

What the gradient decides comes out alike in all, what it leaves open does not. So the
mean correlation r of k attempts says how much of them is of the image: with independent
errors of the same size the best linear estimate from their mean keeps
:math:`kr/(1 + (k - 1)r)` of its distance from what the prior expects (Spearman 1910;
Brown 1910). Coarse structures are found before fine ones, which is why it is done band
by band of frequencies. Attempts that match the gradient worse count less; with unequal
weights k is their effective number (Kish 1965).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.priors import CosinePrior

__all__ = ["agreed"]

# The number of components grows by this factor from band to band: half of the
# wavelength.
_BAND = 4
# An attempt that is worse by so much counts 1/e as much.
_WORSE = 0.01


def agreed(
    attempts: Float[Tensor, "attempts targets images *sample"],
    unlikely: Float[Tensor, "attempts targets"],
    spectrum: CosinePrior,
) -> Float[Tensor, "targets images *sample"]:
    """An image between attempts, as far from the prior's mean as they agree.

    Args:
        attempts: pixel units.
        unlikely: half of the squared part of the gradient's direction that each leaves
            unmatched, or more; infinite where there was no attempt.
        spectrum: what is known of images.

    Returns:
        Images, pixel units, not cut off at the ends of the range. A single attempt
        stands.

    Example:
        >>> import torch
        >>> prior = CosinePrior(torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
        >>> x, none = torch.rand(1, 1, 1, 2, 2, dtype=torch.float64), torch.zeros(2, 1)
        >>> torch.testing.assert_close(agreed(torch.stack([x, x]), none, prior), x)
        >>> float(agreed(torch.stack([x, -x]), none, prior).abs().max())  # the mean
        0.0
    """
    mean = spectrum.mean.flatten().to(attempts)
    found = spectrum.coefficients(attempts.flatten(3) - mean)
    worse = (unlikely - unlikely.min(0).values).to(found)
    weight = torch.softmax(-worse / _WORSE, 0)
    # With fewer than two nothing would be known of how good they are.
    count = weight.square().sum(0).reciprocal().clamp_min(2)[:, None]
    pairs = weight[:, None] * weight
    pairs = pairs - torch.diag_embed(pairs.diagonal(dim1=0, dim2=1), dim1=0, dim2=1)
    kept = torch.zeros_like(found[0])
    order = spectrum.variance.flatten().argsort(descending=True, stable=True)
    order = order.to(found.device)
    start, size = 0, spectrum.mean.shape[0]
    while start < len(order):
        band = order[start:size]
        a = found[..., band]
        sizes = a.norm(dim=-1)
        alike = torch.einsum("ijt,itmc,jtmc->tm", pairs, a, a)
        most = torch.einsum("ijt,itm,jtm->tm", pairs, sizes, sizes)
        r = torch.where(most > 0, alike / most.clamp_min(1e-300), 1.0).clamp(0, 1)
        part = count * r / (1 + (count - 1) * r)
        kept[..., band] = part[..., None] * torch.einsum("it,itmc->tmc", weight, a)
        start, size = size, _BAND * size
    return (mean + spectrum.images(kept)).view(attempts.shape[1:])

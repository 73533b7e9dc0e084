r"""What two attempts at the same image are worth where neither matched its gradient.

What the gradient decides comes out alike in both, what it leaves open does not. So the
correlation r of two attempts says how much of them is of the image: with independent
errors of the same size the best linear estimate from their mean keeps
:math:`2r/(1 + r)` of its distance from what the prior expects (Spearman 1910; Brown
1910). Coarse structures are found before fine ones, which is why it is done band by
band of frequencies.
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


def agreed(
    better: Float[Tensor, "targets images *sample"],
    other: Float[Tensor, "targets images *sample"],
    spectrum: CosinePrior,
) -> Float[Tensor, "targets images *sample"]:
    """An image between two attempts, as far from the prior's mean as they agree.

    Args:
        better: attempts, pixel units; the likelier ones. Where both agree it is these.
        other: attempts of another kind, whose errors are others.
        spectrum: what is known of images.

    Returns:
        Images, pixel units, not cut off at the ends of the range.

    Example:
        >>> import torch
        >>> prior = CosinePrior(torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
        >>> x = torch.rand(1, 1, 1, 2, 2, dtype=torch.float64)
        >>> torch.testing.assert_close(agreed(x, x, prior), x)
        >>> float(agreed(x, -x, prior).abs().max())  # the prior's mean
        0.0
    """
    mean = spectrum.mean.flatten().to(better)
    first, second = (
        spectrum.coefficients(x.flatten(2) - mean) for x in (better, other)
    )
    kept = torch.zeros_like(first)
    order = spectrum.variance.flatten().argsort(descending=True, stable=True)
    order = order.to(first.device)
    start, size = 0, spectrum.mean.shape[0]
    while start < len(order):
        band = order[start:size]
        a, b = first[..., band], second[..., band]
        lengths = (a.square().sum(-1) * b.square().sum(-1)).sqrt()
        r = ((a * b).sum(-1) / lengths.clamp_min(1e-300)).clamp(0, 1)[..., None]
        # Who agree hardly are equally bad, and their errors average.
        middle = a + (1 - r) * (b - a) / 2
        kept[..., band] = 2 * r / (1 + r) * middle
        start, size = size, _BAND * size
    return (mean + spectrum.images(kept)).view(better.shape)

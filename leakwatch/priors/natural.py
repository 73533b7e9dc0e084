r"""The prior of photographs in general: what an attacker knows without any data.

The power of photographs falls with spatial frequency as 1/f^α (Field 1987, "Relations
between the statistics of natural images and the response properties of cortical cells":
α about 2; Torralba & Oliva 2003, "Statistics of natural image categories": 1.8 to 2.7),
and their colours vary mostly together: along grey, then yellow to blue, then red to
green (Ruderman, Cronin & Chiao 1998, "Statistics of cone responses to natural images").
"""

from __future__ import annotations

from typing import Any

import torch

from leakwatch.checks import check_number
from leakwatch.priors.cosine import CosinePrior

__all__ = ["natural_prior"]

# Measured on 4,000 CIFAR-10 and 20 ImageNet images: α 2.4 to 2.8 up to 56×56, mean
# 0.38 to 0.49, variance 0.049 to 0.063, and these shares of it along the three axes.
_EXPONENT = 2.4
_MEAN, _STD = 0.45, 0.24
_SHARES = (0.88, 0.08, 0.04)
_AXES = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (1.0, -2.0, 1.0))


def natural_prior(
    shape: tuple[int, ...], *, data_range: float = 1.0, std: float | None = None
) -> CosinePrior:
    """The prior of photographs.

    Args:
        shape: of one sample, channels first: ``(c, h, w)``. Three channels are red,
            green and blue; other numbers of channels are taken as independent.
        data_range: of pixels, from 0.
        std: of a pixel around the mean, pixel units; default: 0.24 of the range.

    Raises:
        ValueError: for a shape without height and width, or numbers out of range.

    Example:
        >>> prior = natural_prior((1, 8, 8))
        >>> round(prior.std, 2), bool(prior.variance[0, 0, 1] > prior.variance[0, 0, 4])
        (0.24, True)
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ValueError(
            f"prior='natural' is for images of shape (channels, height, width), got "
            f"samples of shape {tuple(shape)}; use 'white' or 'data'."
        )
    check_number("data_range", data_range, example=1.0)
    level = _STD * data_range if std is None else check_number("std", std, example=0.2)
    c, h, w = shape
    exact: dict[str, Any] = {"dtype": torch.float64, "device": "cpu"}
    rows, columns = (torch.arange(n, **exact) for n in (h, w))
    # Relative to the longer side, so that a pixel is as wide as it is high.
    side = max(h, w)
    f = torch.hypot(rows[:, None] * side / h, columns[None] * side / w)
    power = f.clamp_min(1.0) ** -_EXPONENT
    shares = torch.full((c,), 1 / c, **exact)
    axes = None
    if c == len(_SHARES):
        shares = torch.tensor(_SHARES, **exact)
        axes = torch.tensor(_AXES, **exact).T
        axes = axes / axes.norm(dim=0)
    variance = shares[:, None, None] * power
    variance = variance * (level**2 / variance.mean())
    mean = torch.full(shape, _MEAN * data_range, **exact)
    return CosinePrior(mean, variance, axes, "the statistics of photographs")

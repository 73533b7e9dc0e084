"""What an attacker without any gradient achieves, which an attack has to beat."""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["BASELINES", "best_constant", "mean_image"]

#: Name → meaning.
BASELINES: Final = {
    "constant": "the best image of one colour, which an oracle chose for this sample",
    "mean": "the mean image of the data",
}


def best_constant(originals: Float[Tensor, "n ..."]) -> Float[Tensor, "n ..."]:
    """For each sample the constant image of least squared error: its channels' means.

    Args:
        originals: images (channels, height, width), or features, where one value
            stands for all.

    Returns:
        Same shape.

    Example:
        >>> best_constant(torch.tensor([[[[0.0, 1.0]], [[2.0, 2.0]]]])).flatten()
        tensor([0.5000, 0.5000, 2.0000, 2.0000])
    """
    dims = tuple(range(2 if originals.ndim > 2 else 1, originals.ndim))
    mean = originals.detach().double().mean(dims, keepdim=True)
    return mean.to(originals.dtype).expand_as(originals)


def mean_image(
    originals: Float[Tensor, "n ..."], mean: Float[Tensor, "..."] | None = None
) -> Float[Tensor, "n ..."]:
    """One guess for all samples.

    Args:
        originals: the samples.
        mean: the mean sample of the data, such as a probe set's ``prior_mean``, in the
            same units; ``None``: the mean of the *other* samples given, so that none
            helps to guess itself. A single sample then gets zeros.

    Returns:
        Same shape as ``originals``.

    Raises:
        ValueError: if ``mean`` has another shape than one sample.
    """
    x = originals.detach()
    if mean is not None:
        if mean.shape != x.shape[1:]:
            raise ValueError(
                f"mean must have the shape of one sample, {tuple(x.shape[1:])}, got "
                f"{tuple(mean.shape)}."
            )
        return mean.detach().to(x).expand_as(x)
    if len(x) == 1:
        return torch.zeros_like(x)
    wide = x.double()
    return ((wide.sum(0) - wide) / (len(x) - 1)).to(x.dtype)

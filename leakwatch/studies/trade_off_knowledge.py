"""What different attackers match of the same message."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.starts import stream
from leakwatch.defenses import (
    Defense,
    Isotropic,
    Observation,
    Samples,
    Shared,
    observed,
)

__all__ = ["NotComputedError", "informed", "plain", "reimagined", "share", "tells_all"]


class NotComputedError(Exception):
    """This attack can't be the one that was asked for."""


def share(defense: Defense | None, samples: Samples, seed: int) -> Shared:
    """A message for each sample.

    Args:
        defense: ``None`` for none.
        samples: whose gradients are shared.
        seed: of the noise; training that is seeded with it draws other noise.
    """
    g = samples.gradient
    if defense is None:
        return Shared(g, g, torch.zeros(len(g), dtype=torch.float64, device=g.device))
    return defense.protect(g, generator=stream(seed, 1), samples=samples)


def plain(samples: Samples, shared: Shared, row: int) -> Observation:
    """For the attacker who takes the noise for isotropic, and knows its size.

    Args:
        samples: whose messages they are.
        shared: the messages.
        row: which.
    """
    std = math.sqrt(float(shared.variance[row]) / shared.gradient.shape[1])
    return Observation(samples.gradients, shared.gradient[row : row + 1], std)


def informed(samples: Samples, shared: Shared, row: int) -> Observation:
    """For the attacker who knows the defense; see :func:`leakwatch.defenses.observed`.

    Args:
        samples: whose messages they are.
        shared: the messages.
        row: which.

    Raises:
        NotComputedError: for mixtures of samples.
    """
    if shared.knowledge.mixing is not None:
        raise NotComputedError(
            "an attack on a mixture of samples is an attack on another image, and not "
            "what is compared here."
        )
    return observed(samples.gradients, shared, row)


def tells_all(shared: Shared) -> bool:
    """Whether there is nothing about the defense that the plain attacker lacks."""
    known = shared.knowledge
    isotropic = known.covariance is None or isinstance(known.covariance, Isotropic)
    nothing = known.kept is None and known.clip is None and known.mixing is None
    return isotropic and nothing


def reimagined(
    defense: Defense,
    shared: Shared,
    samples: Samples,
    row: int,
    image: Float[Tensor, "one ..."],
    seed: int,
) -> Observation:
    """For the attacker who knows what the defense would have done at another image.

    Args:
        defense: whose noise depends on the sample.
        shared: the messages.
        samples: whose messages they are; of them only the label is used.
        row: which.
        image: a reconstruction, network input.
        seed: of whatever the defense draws, which is not used.
    """
    at = Samples(samples.gradients, image.to(samples.x), samples.y[row : row + 1])
    guess = defense.protect(at.gradient, generator=stream(seed, 2), samples=at)
    guess = replace(guess, gradient=shared.gradient[row : row + 1])
    return informed(samples, guess, 0)

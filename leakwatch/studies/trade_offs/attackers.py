"""What different attackers match of the same answers, and what they make of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.start import stream
from leakwatch.defenses import (
    Defense,
    Isotropic,
    Mixing,
    Observation,
    Samples,
    Shared,
    averaged,
    observed,
)

__all__ = [
    "Aim",
    "Answers",
    "NotComputedError",
    "informed",
    "mixtures",
    "plain",
    "reimagined",
    "share",
    "tells_all",
]


class NotComputedError(Exception):
    """This attack can't be the one that was asked for."""


@final
@dataclass(frozen=True, eq=False)
class Answers:
    """What clients with one sample each answered to the same query, once or more often.

    Attributes:
        each: the answers, a message of every sample in each.
        mean: of the messages. The mean of mixtures is no mixture; what is known of it
            is what is known of the first.
    """

    each: tuple[Shared, ...]
    mean: Shared

    @classmethod
    def of(cls, each: tuple[Shared, ...]) -> Answers:
        """With their mean.

        Args:
            each: at least one.
        """
        if len(each) == 1 or each[0].knowledge.mixing is None:
            return cls(each, averaged(each) if len(each) > 1 else each[0])
        message = torch.stack([a.gradient.double() for a in each]).mean(0)
        message = message.to(each[0].gradient)
        mean = replace(each[0], gradient=message, bias=message - each[0].clean)
        return cls(each, mean)

    @property
    def queries(self) -> int:
        """How many."""
        return len(self.each)

    @property
    def mixed(self) -> bool:
        """Whether they are gradients of mixtures of samples."""
        return self.mean.knowledge.mixing is not None

    def mixings(self, row: int) -> list[Mixing]:
        """Those of one sample, one of each answer.

        Args:
            row: which sample.
        """
        mixings = [answer.knowledge.mixing for answer in self.each]
        return [mixing.select(row) for mixing in mixings if mixing is not None]

    @property
    def delta_norm(self) -> Float[Tensor, " n"]:
        """‖δ‖ of an answer, root mean square over them, for each sample."""
        squares = [a.delta.double().square().sum(1) for a in self.each]
        return torch.stack(squares).mean(0).sqrt()


@final
@dataclass(frozen=True, eq=False)
class Aim:
    """What an attacker matches, and what there is to be found.

    Attributes:
        observation: what is matched.
        truth: the image that matches it, ``(1, ...)``, network input.
    """

    observation: Observation
    truth: Float[Tensor, "one ..."]


def share(
    defense: Defense | None, samples: Samples, seed: int, queries: int = 1
) -> Answers:
    """A message for each sample, as often as it is asked for.

    Args:
        defense: ``None`` for none.
        samples: whose gradients are shared.
        seed: of the noise; training that is seeded with it draws other noise.
        queries: how often; the first answer does not depend on it.
    """
    g = samples.gradient
    if defense is None:
        nothing = torch.zeros(len(g), dtype=torch.float64, device=g.device)
        return Answers.of((Shared(g, g, nothing),) * queries)
    drawn = stream(seed, 1)
    return Answers.of(
        tuple(
            defense.protect(g, generator=drawn, samples=samples) for _ in range(queries)
        )
    )


def plain(samples: Samples, answers: Answers, row: int) -> Aim:
    """For the attacker who takes all noise for isotropic, and knows its size.

    Args:
        samples: whose messages they are.
        answers: the messages; their mean is attacked.
        row: which.
    """
    mean = answers.mean
    std = math.sqrt(float(mean.variance[row]) / mean.gradient.shape[1])
    observation = Observation(samples.gradients, mean.gradient[row : row + 1], std)
    return Aim(observation, samples.x[row : row + 1])


def informed(samples: Samples, answers: Answers, row: int) -> Aim:
    """For the attacker who knows the defense; see :func:`leakwatch.defenses.observed`.

    Args:
        samples: whose messages they are.
        answers: the messages, not of mixtures; their mean is attacked.
        row: which.
    """
    observation = observed(samples.gradients, answers.mean, row)
    return Aim(observation, samples.x[row : row + 1])


def mixtures(samples: Samples, answers: Answers, row: int) -> tuple[Aim, ...]:
    """For attackers who know α and both labels: each mixture is an image of its own.

    Args:
        samples: whose messages they are.
        answers: the messages of mixtures.
        row: which.
    """
    aims = []
    for answer, mixing in zip(answers.each, answers.mixings(row), strict=True):
        observation = observed(samples.gradients, answer, row)
        aims.append(Aim(observation, mixing.mixed.to(samples.x)))
    return tuple(aims)


def tells_all(answers: Answers) -> bool:
    """Whether there is nothing about the defense that the plain attacker lacks."""
    knowledge = answers.mean.knowledge
    isotropic = knowledge.covariance is None or isinstance(
        knowledge.covariance, Isotropic
    )
    return (
        isotropic
        and knowledge.kept is None
        and knowledge.clip is None
        and not answers.mixed
    )


def reimagined(
    defense: Defense,
    answers: Answers,
    samples: Samples,
    row: int,
    image: Float[Tensor, "one ..."],
    seed: int,
) -> Aim:
    """For the attacker who knows what the defense would have done at another image.

    Args:
        defense: whose noise depends on the sample.
        answers: the messages.
        samples: whose messages they are; of them only the label is used.
        row: which.
        image: a reconstruction, network input.
        seed: of whatever the defense draws, which is not used.
    """
    at = Samples(samples.gradients, image.to(samples.x), samples.y[row : row + 1])
    guess = defense.protect(at.gradient, generator=stream(seed, 2), samples=at)
    guess = replace(guess, gradient=answers.mean.gradient[row : row + 1])
    observation = observed(samples.gradients, guess, queries=answers.queries)
    return Aim(observation, samples.x[row : row + 1])

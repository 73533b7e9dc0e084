"""Descent in the coordinates of an image prior, from coarse to fine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.base import GradientAttack, GradientTask, SearchResult
from leakwatch.attacks.generators.search import Phase, search
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.objective import MatchingProblem
from leakwatch.attacks.pixels import PixelScale
from leakwatch.checks import check_integer, check_number
from leakwatch.priors import CosinePrior, GaussianPrior, MeasuredPrior, natural_prior

__all__ = ["CoarseToFine"]

# Part of the steps after which all components are there.
_GROWN = 0.8


@final
@dataclass(frozen=True, eq=False)
class CoarseToFine(GradientAttack):
    r"""Descends on coefficients of cosines instead of pixels, low frequencies first.

    The image is x = μ + T √v z, with the cosines T, their variances v and the mean μ of
    an image prior. Adam moves z, in which all directions are equally likely: a step
    changes what varies much in images more than what hardly does, so that no weight of
    a smoothness term has to fit the data. It begins with the few components of largest
    variance, and more join in while it goes on.

    Args:
        name: recorded in results.
        steps: of Adam.
        lr: its step size, standard deviations of a component.
        distance: ``"cosine"``, ``"l2"`` or ``"l1"``.
        weight: of ‖z‖²/d_x, which is 1 for typical images of the prior.
        components: how many are there at the start.
        prior: what is known of images. Default: for samples that are images, the
            statistics of photographs.

    Raises:
        ValueError: for numbers out of range; at the start, for samples that are no
            images where no prior is given.

    Example:
        >>> from leakwatch.attacks.coarse_to_fine import CoarseToFine
        >>> CoarseToFine(components=64).changed(steps=300).steps
        300
    """

    name: str = "coarse-to-fine"
    steps: int = 1500
    lr: float = 0.05
    distance: str = "cosine"
    weight: float = 1e-4
    components: int = 32
    prior: GaussianPrior | None = None

    def __post_init__(self) -> None:
        check_integer("steps", self.steps, example=1500)
        check_integer("components", self.components, example=32)
        check_number("lr", self.lr, example=0.05)
        check_number("weight", self.weight, "[0, inf)", example=1e-4)
        distances.get(self.distance)

    def search(self, task: GradientTask) -> SearchResult:
        """Descends from the first images, as far as the first components show them.

        Raises:
            ValueError: for a prior of other samples.
        """
        spectrum = self.spectrum(task)
        problem = MatchingProblem(task.gradients, task.shared, self.distance)
        first = task.first_images(box=True)
        phase = Phase(self.steps, self.lr, decay=True, l2=self.weight / spectrum.size)
        with problem.opened() as matcher:
            return search(
                matcher,
                _Components(first.flatten(0, 1), spectrum, task.pixels, self),
                task.labels.repeat(task.restarts, 1),
                task.targets,
                phase,
                deadline=task.deadline,
                tick=task.tick(self.steps),
            ).judged(task)

    def fit_to(
        self,
        sample_shape: tuple[int, ...],
        *,
        prior_std: float,
        prior_mean: Float[Tensor, "*sample"] | None,
        prior: GaussianPrior | None = None,
    ) -> Self:
        """With this prior, unless it has one of its own."""
        known = isinstance(prior, MeasuredPrior | CosinePrior)
        return replace(self, prior=prior) if self.prior is None and known else self

    def fits(self, sample_shape: tuple[int, ...]) -> bool:
        """Whether anything is known of samples of this shape."""
        return self.prior is not None or len(sample_shape) == 3

    def spectrum(self, task: GradientTask) -> CosinePrior:
        """The prior, as it counts for a run.

        Raises:
            ValueError: for a prior of other samples, or without frequencies.
        """
        shape, peak = tuple(task.shared.sample_shape), task.pixels.data_range
        prior = self.prior
        if prior is None:
            return natural_prior(shape, data_range=1.0 if peak is None else peak)
        prior.check(shape)
        if isinstance(prior, MeasuredPrior):
            return prior.spectrum
        if isinstance(prior, CosinePrior):
            return prior
        raise ValueError(
            f"attack {self.name!r} descends on frequencies, which a "
            f"{type(prior).__name__} does not have; give one of measured_prior() or "
            f"natural_prior()."
        )


@final
class _Components:
    """Images by their components; see `leakwatch.attacks.generators.search_space`."""

    def __init__(
        self,
        first: Float[Tensor, "attacks images ..."],
        spectrum: CosinePrior,
        pixels: PixelScale,
        settings: CoarseToFine,
    ) -> None:
        self._spectrum, self._pixels = spectrum, pixels
        self._total = settings.steps
        self._least = min(settings.components, spectrum.size)
        self._mean = spectrum.mean.flatten().to(first)
        std = spectrum.variance.flatten().sqrt()
        order = std.argsort(descending=True, stable=True)
        self._rank = torch.empty_like(order)
        self._rank[order] = torch.arange(len(order))
        self._rank = self._rank.to(first.device)
        self._std = std.to(first)
        self._shape = first.shape
        apart = pixels.to_pixels(first).flatten(2) - self._mean
        z = spectrum.coefficients(apart) / self._std
        # A random image is far from typical in its finest components.
        self.z = (z * self._shown(0)).clamp(-1, 1).contiguous().requires_grad_()
        self._step = 0

    @property
    def attacks(self) -> int:
        """How many there are."""
        return len(self.z)

    @property
    def parameters(self) -> tuple[Float[Tensor, "attacks images d_x"], ...]:
        """The components."""
        return (self.z,)

    def images(self) -> Float[Tensor, "attacks images ..."]:
        """Images of the components that are there by now, in the range of pixels."""
        z = self.z * (self._std * self._shown(self._step))
        self._step += 1
        p = (self._mean + self._spectrum.images(z)).view(self._shape)
        low, high = self._pixels.low, self._pixels.high
        if low is not None and high is not None:
            p = p.clamp(low, high)
        return self._pixels.to_input(p)

    def _shown(self, step: int) -> Tensor:
        """1 for the components that take part at a step, from few to all."""
        least, every = self._least, len(self._rank)
        grown = min(1.0, step / max(_GROWN * self._total, 1.0))
        count = least * math.exp(grown * math.log(every / least))
        return (self._rank < round(count)).to(self._std)

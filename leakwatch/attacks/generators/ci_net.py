"""CI-Net: an untrained, over-parameterised generator as the search space.

Zhang et al., "Generative Gradient Inversion via Over-Parameterized Networks in
Federated Learning" (ICCV 2023). The paper's text and its code differ; what follows
which is said with each argument.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch

from leakwatch.attacks.base import GradientAttack, GradientTask, SearchResult
from leakwatch.attacks.generators.ci_generator import (
    CINet,
    choose_width,
    enclosing_side,
)
from leakwatch.attacks.generators.search import Phase, search
from leakwatch.attacks.generators.search_space import GeneratorWeights, OutputScale
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.objective import MatchingProblem
from leakwatch.attacks.start import stream
from leakwatch.checks import check_integer
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng

__all__ = ["CINetAttack"]


@final
@dataclass(frozen=True)
class CINetAttack(GradientAttack):
    """Searches the parameters of a CI-Net, from random ones, for a fixed latent.

    Each image of a gradient has a latent of its own, N(0, 1); the generator is shared
    by them, its BatchNorm in train mode. Adam takes the *sign* of the parameters'
    gradients, without decay. The best images by matching distance are returned.

    Args:
        name: recorded in results.
        steps: of Adam; 2,000 in the CIFAR-10 notebook, 150,000 in the paper for 256
            images.
        lr: learning rate.
        distance: ``"cosine"`` as in the code; the paper's Algorithm 1 writes a norm
            of the difference: ``"l1"`` or ``"l2"``.
        width: hidden channels, or the rule by which to choose them, see
            :func:`leakwatch.attacks.generators.ci_generator.choose_width`.
        signed: see above.
        tv: weight of total variation; the code has none.
        latent: length of the latent vectors.

    The generator's tanh is mapped to the range of pixels; the authors' code compares
    (−1, 1) with pixels in [0, 1] as it is. Without a known range its output is not
    bounded. Other sizes than 4 · 2^k are cropped from the next larger one.

    Raises:
        ValueError: for values out of range, here or in ``run``.
    """

    only_normal_start: ClassVar[bool] = True
    name: str = "ci-net"
    steps: int = 2000
    lr: float = 1e-3
    distance: str = "cosine"
    width: int | Literal["paper", "code"] = "paper"
    signed: bool = True
    tv: float = 0.0
    latent: int = 128

    def __post_init__(self) -> None:
        self._phase()
        distances.get(self.distance)
        if isinstance(self.width, int):
            check_integer("width", self.width, example=32)
        check_integer("latent", self.latent, example=128)

    def search(self, task: GradientTask) -> SearchResult:
        """Searches the weights of one generator for each target and restart.

        Raises:
            ValueError: for samples that are not images.
        """
        shape = task.shared.sample_shape
        if len(shape) != 3:
            raise ValueError(
                f"CI-Net makes images (channels, height, width), the network takes "
                f"samples of shape {shape}."
            )
        problem = MatchingProblem(task.gradients, task.shared, self.distance)
        with problem.opened() as matcher:
            return search(
                matcher,
                self._candidates(task),
                torch.cat([task.labels] * task.restarts),
                task.targets,
                self._phase(),
                deadline=task.deadline,
                tick=task.tick(self.steps),
            ).judged(task)

    def _phase(self) -> Phase:
        return Phase(self.steps, self.lr, signed=self.signed, tv=self.tv)

    def _candidates(self, task: GradientTask) -> GeneratorWeights:
        shared, pixels = task.shared, task.pixels
        channels, height, width = shared.sample_shape
        side = enclosing_side(max(height, width))
        hidden = self.width
        if not isinstance(hidden, int):
            hidden = choose_width(
                hidden,
                shared_parameters=task.gradients.size,
                images=shared.images,
                channels=channels,
                side=side,
                latent=self.latent,
            )
        generators, latents = [], []
        for place in task.places:
            draws = stream(task.seed, *place)
            latents.append(torch.randn(shared.images, self.latent, generator=draws))
            with isolated_rng(draws.initial_seed()):
                generators.append(
                    CINet(channels, side, hidden, self.latent, pixels.boxed)
                )
        return GeneratorWeights(
            generators,
            torch.stack(latents).to(task.device, task.gradients.dtype),
            OutputScale(
                (-1.0, 1.0) if pixels.boxed else None, pixels, shared.sample_shape
            ),
            train=True,
        )

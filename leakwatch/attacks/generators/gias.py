"""A generator of the user's as the search space: GIAS, and without training GION.

Jeon et al., "Gradient Inversion with Generative Image Prior" (NeurIPS 2021).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from leakwatch.attacks.base import GradientAttack, GradientTask, SearchResult
from leakwatch.attacks.generators.search import AdamResult, Phase, search
from leakwatch.attacks.generators.search_space import (
    GeneratorWeights,
    Latents,
    OutputScale,
)
from leakwatch.attacks.matching import distances
from leakwatch.attacks.matching.objective import Matcher, MatchingProblem
from leakwatch.attacks.start import stream
from leakwatch.checks import check_integer
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.derivatives.safe_ops.substitutes import Substitutes

__all__ = ["GIASAttack"]


@final
@dataclass(frozen=True, eq=False)
class GIASAttack(GradientAttack):
    """Searches a generator's latents first, then its parameters.

    Phase 1: Adam on the latents, N(0, 1) at first, the generator fixed; the best
    restart by matching distance goes on. Phase 2: latents fixed, each image gets its
    own copy of the generator, and Adam moves the copies' parameters: this is how
    images are reached that the generator can't make. Both with the step decay of
    Geiping et al. 2020.

    With ``pretrained=False`` (the authors' GION, for when no images of the kind are to
    be had) there is no first phase: every restart searches the parameters of freshly
    initialised generators for random latents, and the generator's structure is all
    that is known of images.

    Args:
        generator: takes ``(batch, *latent_shape)``, returns ``(batch, *sample)``; runs
            in eval mode. It is not changed.
        latent_shape: of one latent, such as ``(100,)`` or ``(100, 1, 1)``.
        output_range: what the generator's darkest and brightest output stands for:
            (−1, 1) for tanh, (0, 1) for sigmoid; ``None``: it puts out network inputs.
        latent_steps: of phase 1; 1,000 in the authors' FFHQ script with a DCGAN.
        latent_lr: of phase 1; 0.1 for a DCGAN, 0.03 for a StyleGAN2.
        weight_steps: of phase 2; 5,000 in the scripts; 0 for none.
        weight_lr: of phase 2.
        distance: of gradients.
        tv: weight of total variation.
        pretrained: whether the generator's parameters mean anything.
        name: recorded in results. Default: ``"gias"``, or ``"gion"`` without
            pretraining.

    Raises:
        TypeError: if ``generator`` is not a module.
        ValueError: for values out of range, no phase at all, or, without pretraining,
            a generator with parameters that can't be initialised anew.
    """

    only_normal_start: ClassVar[bool] = True
    generator: nn.Module
    latent_shape: Sequence[int]
    output_range: tuple[float, float] | None = (-1.0, 1.0)
    latent_steps: int = 1000
    latent_lr: float = 0.1
    weight_steps: int = 5000
    weight_lr: float = 1e-3
    distance: str = "cosine"
    tv: float = 1e-6
    pretrained: bool = True

    def __post_init__(self) -> None:
        if self.name in ("", "gias", "gion"):
            own = "gias" if self.pretrained else "gion"
            object.__setattr__(self, "name", own)
        generator: object = self.generator
        if not isinstance(generator, nn.Module):
            raise TypeError(f"generator must be a torch.nn.Module, got {generator!r}.")
        shape: object = self.latent_shape
        if not isinstance(shape, Sequence):
            raise TypeError(
                f"latent_shape must be the shape of one latent, such as (100,), got "
                f"{shape!r}."
            )
        ends = self.output_range
        if ends is not None and not ends[0] < ends[1]:
            raise ValueError(
                f"output_range must be (darkest, brightest), such as (-1.0, 1.0), or "
                f"None, got {self.output_range!r}."
            )
        distances.get(self.distance)
        check_integer("latent_steps", self.latent_steps, smallest=0, example=1000)
        check_integer("weight_steps", self.weight_steps, smallest=0, example=5000)
        if self._steps == 0:
            raise ValueError(
                "there is nothing to search: give latent_steps or weight_steps, and "
                "weight_steps without pretraining."
            )
        self._phase(1, self.latent_lr)
        self._phase(1, self.weight_lr)
        if not self.pretrained:
            _fresh(self.generator, 0)

    @property
    def _steps(self) -> int:
        return self.weight_steps + (self.latent_steps if self.pretrained else 0)

    def search(self, task: GradientTask) -> SearchResult:
        """Searches latents, then weights.

        Raises:
            ValueError: for an ``output_range`` without a known range of pixels, or a
                generator of samples of another shape.
        """
        shared = task.shared
        scale = OutputScale(self.output_range, task.pixels, shared.sample_shape)
        latents = torch.stack(
            [
                torch.randn(
                    shared.images,
                    *self.latent_shape,
                    generator=stream(task.seed, *place),
                )
                for place in task.places
            ]
        ).to(task.device, task.gradients.dtype)
        problem = MatchingProblem(task.gradients, shared, self.distance)
        with problem.opened() as matcher, Substitutes():
            if self.pretrained:
                return self._pretrained(matcher, task, latents, scale).judged(task)
            generators = [
                _fresh(self.generator, stream(task.seed, *place, 1).initial_seed())
                for place in task.places
            ]
            return self._search_weights(
                matcher, task, generators, latents, task.targets, scale
            ).judged(task)

    def _pretrained(
        self, matcher: Matcher, task: GradientTask, latents: Tensor, scale: OutputScale
    ) -> AdamResult:
        steps = self.latent_steps
        first = search(
            matcher,
            Latents(self.generator, latents, scale),
            torch.cat([task.labels] * task.restarts),
            task.targets,
            # Without a first phase this only judges the random latents.
            self._phase(max(1, steps), self.latent_lr),
            deadline=task.deadline if steps else -math.inf,
            tick=task.tick(self._steps) if steps else None,
        )
        if self.weight_steps == 0 or (steps and first.stopped):
            return first
        targets = task.shared.targets
        best = first.loss.view(task.restarts, targets).argmin(0)
        at = best * targets + torch.arange(targets, device=best.device)
        second = self._search_weights(
            matcher,
            task,
            [self.generator] * targets,
            first.parameters[0][at],
            torch.arange(targets, device=best.device),
            scale,
            before=steps,
        )
        return _continued(first, second, at)

    def _search_weights(
        self,
        matcher: Matcher,
        task: GradientTask,
        generators: list[nn.Module],
        latents: Tensor,
        targets: Tensor,
        scale: OutputScale,
        before: int = 0,
    ) -> AdamResult:
        images = latents.shape[1]
        each = [g for generator in generators for g in [generator] * images]
        return search(
            matcher,
            GeneratorWeights(each, latents, scale),
            torch.cat([task.labels] * (len(latents) // len(task.labels))),
            targets,
            self._phase(self.weight_steps, self.weight_lr),
            deadline=task.deadline,
            tick=task.tick(self._steps, before),
        )

    def _phase(self, steps: int, lr: float) -> Phase:
        return Phase(steps, lr, decay=True, tv=self.tv)


def _continued(first: AdamResult, second: AdamResult, at: Tensor) -> AdamResult:
    """The first phase, with what the second made of the attacks ``at``."""
    better = second.loss < first.loss[at]
    places = at[better]
    first.images[places] = second.images[better]
    first.loss[places] = second.loss[better]
    first.steps[at] += second.steps
    broken = list(first.broken)
    for place, gave_up in zip(at.tolist(), second.broken, strict=True):
        broken[place] = broken[place] or gave_up
    # The attacks that ended with the first phase stay where they were.
    later = first.history[-1].repeat(len(second.history), 1)
    later[:, at] = second.history
    return replace(
        first,
        stopped=second.stopped,
        broken=tuple(broken),
        history=torch.cat([first.history, later]),
    )


def _fresh(generator: nn.Module, seed: int) -> nn.Module:
    """A copy whose parameters are drawn anew, as its layers draw them.

    Raises:
        ValueError: if a layer with parameters of its own can't do that.
    """
    module = copy.deepcopy(generator)
    with isolated_rng(seed):
        for name, part in module.named_modules():
            reset = getattr(part, "reset_parameters", None)
            if callable(reset):
                reset()
            elif any(True for _ in part.parameters(recurse=False)):
                raise ValueError(
                    f"pretrained=False needs layers that can be initialised anew, but "
                    f"{name or type(part).__name__} ({type(part).__name__}) has "
                    f"parameters and no reset_parameters()."
                )
    return module

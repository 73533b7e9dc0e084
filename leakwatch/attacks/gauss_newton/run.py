"""One run of the Gauss–Newton attack: its objectives, limits and restarts."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.gauss_newton.levenberg_marquardt import Descent, Found, Settings
from leakwatch.attacks.gauss_newton.objective import Objective
from leakwatch.attacks.gauss_newton.steps import DenseSteps, MatrixFreeSteps
from leakwatch.attacks.labels.slopes import logit_slopes
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start, stream
from leakwatch.derivatives import GradientMap

if TYPE_CHECKING:
    from leakwatch.attacks.gauss_newton.attack import GaussNewton

__all__ = ["Attempt"]

# J of one attack in float64 up to which forming H beats conjugate gradients: measured,
# see the class.
_DENSE_BYTES = 256 * 2**20
# Standard deviation of a uniform variable on [0, 1].
_UNIFORM_STD = 1 / math.sqrt(12)
# Matched to this relative rest, a target needs no further restart.
_EXACT = 1e-4
# With this relative rest a ReLU network's image is nearly right, and held by kinks:
# it is shaken by these parts of the range, instead of forgotten.
_NEARLY = 0.15
_KICKS = (0.03, 0.01, 0.1)
# Slopes of the logits with more noise than this mislead.
_NOISY = 0.3


@final
class Attempt:
    """One run's objectives, limits and labels; images are pixels, float64."""

    def __init__(
        self,
        attack: GaussNewton,
        gradients: GradientMap,
        shared: SharedGradient,
        pixels: PixelScale,
        start: Start,
        progress: Progress | None,
    ) -> None:
        self.attack, self.gradients, self.shared = attack, gradients, shared
        self.pixels, self.start, self.progress = pixels, start, progress
        self.deadline: float | None = None
        self.wave, self.waves = 0, 1
        self.range = pixels.data_range or 1.0
        self.labels, self.doubts = _labels(gradients, shared)
        target = shared.gradient.double()
        self.length = target.norm(dim=1).clamp_min(torch.finfo(target.dtype).tiny)
        noise = shared.noise_std * math.sqrt(target.shape[1]) / self.length
        # The MAP image leaves about the noise, a little less by what it fits of it.
        self.matched = (1.02 * noise).clamp_min(_EXACT)
        rounding = float(torch.finfo(shared.gradient.dtype).eps)
        self.tolerance = attack.tolerance
        if self.tolerance is None:
            self.tolerance = 20 * rounding
        self.exact = self._objective(self.labels)
        slopes = None
        if attack.logits and shared.images == 1:
            slopes = logit_slopes(gradients, shared, self.labels[:, 0])
        noisy = shared.noise_std > 0 and (
            not start.practical
            or (
                slopes is not None
                and bool(
                    (
                        shared.noise_std * math.sqrt(slopes.shape[1])
                        > _NOISY * slopes.norm(dim=1)
                    ).any()
                )
            )
        )
        self.easier = None if slopes is None or noisy else self._objective(slopes)

    @property
    def over(self) -> bool:
        """Whether the time is."""
        return self.deadline is not None and time.perf_counter() > self.deadline

    def first_images(
        self, seed: int, restarts: int, initial: Tensor | None
    ) -> Float[Tensor, "restarts targets images ..."]:
        """Where the waves begin, pixels."""
        shared = self.shared
        x = self.start.images(
            initial,
            targets=shared.targets,
            images=shared.images,
            shape=shared.sample_shape,
            restarts=restarts,
            seed=seed,
            pixels=self.pixels,
            box=self.attack.box,
            index=shared.index,
            dtype=torch.float64,
            device=shared.gradient.device,
        )
        return self.pixels.to_pixels(x)

    def kick(
        self, seed: int, wave: int, first: Tensor, known: Tensor, rest: Tensor
    ) -> None:
        """Begins from a shaken copy of the best image, where kinks hold it fast."""
        if not self.exact.kinked:
            return
        size = _KICKS[(wave - 1) % len(_KICKS)] * self.range
        names = self.shared.index or range(self.shared.targets)
        for i, name in enumerate(names):
            # Of noisy gradients the noise and the prior are part of it.
            if float(rest[i]) < max(_NEARLY, 1.2 * float(self.matched[i])):
                noise = torch.randn(
                    first.shape[1:],
                    dtype=torch.float64,
                    generator=stream(seed, name, wave, 2),
                )
                first[i] = known[i] + size * noise.to(first)

    def reached(
        self, targets: Int[Tensor, " some"], images: Tensor
    ) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
        """‖g − g̃‖/‖g̃‖ of some targets, and what restarts are compared by.

        That is the objective that was minimised last: of a confident network g itself
        leaves all bounds where a logit is a little wrong. Infinite for NaN.
        """
        p = images.flatten(1)
        r = self.exact.residual(targets, p)
        found, objective = r.norm(dim=1), self.exact
        if self.easier is not None and self.shared.noise_std == 0:
            objective, r = self.easier, self.easier.residual(targets, p)
        both = torch.stack([found, objective.value(targets, p, r)])
        rest, height = torch.nan_to_num(both, nan=math.inf, posinf=math.inf)
        return rest, height

    def solved(self, losses: Float[Tensor, " targets"]) -> Bool[Tensor, " targets"]:
        """Targets that another wave can't improve."""
        if self.shared.noise_std > 0 and self.exact.kinked:
            # Any image matches as far as noise allows; a higher posterior may be found.
            return torch.zeros_like(losses, dtype=torch.bool)
        matched: Tensor = (2 * losses).sqrt() / self.length <= self.matched
        return matched

    def descent(self, targets: Int[Tensor, " some"], p: Tensor) -> Found:
        """One wave for some targets."""
        before = torch.zeros_like(targets)
        if self.easier is not None:
            found = self._descend(self.easier, targets, p)
            images = found.p
            rest, _ = self.reached(targets, images)
            if self.shared.noise_std == 0 or self.over:
                return replace(found, residual=rest)
            p, before = images, found.steps
        found = self._descend(self.exact, targets, p)
        return replace(found, steps=found.steps + before)

    def _descend(self, objective: Objective, targets: Tensor, p: Tensor) -> Found:
        a = self.attack
        how: DenseSteps | MatrixFreeSteps
        numbers = self.shared.gradient.shape[1] * objective.size
        if a.method == "dense" or (a.method == "auto" and 8 * numbers <= _DENSE_BYTES):
            how = DenseSteps(objective, self.deadline)
        else:
            how = MatrixFreeSteps(objective, a.products, a.forcing)
        assert self.tolerance is not None
        settings = Settings(
            steps=a.steps,
            damping=a.damping,
            smoothing=a.smoothing,
            widest=a.widest,
            memory=a.memory,
            patience=a.patience,
            tolerance=self.tolerance,
        )
        bounds = None
        if a.box and self.pixels.low is not None and self.pixels.high is not None:
            bounds = self.pixels.low, self.pixels.high
        state = Descent(objective, how, settings, targets, p, bounds)
        return state.run(deadline=self.deadline, report=self._report)

    def _objective(self, labels: Tensor) -> Objective:
        low, high = self.pixels.low, self.pixels.high
        std, mean = self.attack.prior_std, self.attack.prior_mean
        noise = self.shared.noise_std
        if mean is not None and not _broadcasts(mean, self.shared.sample_shape):
            raise ValueError(
                f"prior_mean must have the shape of one sample, "
                f"{tuple(self.shared.sample_shape)}, got {tuple(mean.shape)}."
            )
        if low is not None and high is not None:
            std = (high - low) * _UNIFORM_STD if std is None else std
            if mean is None:
                mean = torch.full(self.shared.sample_shape, (low + high) / 2)
        elif std is None:
            noise = 0.0
        return Objective(
            self.gradients,
            self.shared.gradient,
            labels,
            sample_shape=self.shared.sample_shape,
            pixels=self.pixels,
            images=self.shared.images,
            noise_std=noise,
            prior_std=1.0 if std is None else std,
            prior_mean=mean,
            fast=self.attack.fast,
        )

    def _report(self, step: int, residuals: Tensor) -> None:
        if self.progress is not None:
            done = self.wave * self.attack.steps + step
            total = self.waves * self.attack.steps
            distance = 0.5 * residuals.median() ** 2
            self.progress(min(done, total), total, float(distance))


def _broadcasts(mean: Tensor, sample: tuple[int, ...]) -> bool:
    """Whether μ can be expanded to a sample."""
    missing = len(sample) - mean.ndim
    return missing >= 0 and all(
        given in (1, wanted)
        for given, wanted in zip(mean.shape, sample[missing:], strict=True)
    )


def _labels(
    gradients: GradientMap, shared: SharedGradient
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels ``(targets, images)``, and what may be wrong with them."""
    if shared.labels is not None:
        return shared.labels, ("",) * shared.targets
    from leakwatch.attacks.labels.infer import infer_labels

    found = infer_labels(shared, gradients)
    return found.labels, tuple(
        "" if s.word == "ok" else f"The labels were inferred: {s}."
        for s in found.status
    )

"""A second-order attacker: Levenberg–Marquardt on the difference of gradients."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal, Self, final, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.base import GradientAttack, GradientTask, SearchResult
from leakwatch.attacks.clock import Clock
from leakwatch.attacks.gauss_newton.levenberg_marquardt import (
    LevenbergMarquardt,
    LevenbergMarquardtResult,
    LevenbergMarquardtSettings,
)
from leakwatch.attacks.gauss_newton.objective import (
    PosteriorObjective,
    fixed_logit_gradient,
)
from leakwatch.attacks.gauss_newton.steps import Costs, DenseSteps, MatrixFreeSteps
from leakwatch.attacks.labels.last_layer import logit_slopes
from leakwatch.attacks.start import stream
from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.derivatives import Criterion
from leakwatch.priors import GaussianPrior

__all__ = ["GaussNewton", "Method", "Waves"]

Method = Literal["auto", "dense", "matrix-free"]

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
@dataclass(frozen=True, eq=False)
class GaussNewton(LevenbergMarquardtSettings, GradientAttack):
    r"""Finds the image whose gradient is the shared one, by Levenberg–Marquardt.

    Minimises

    .. math:: \tfrac12 \|g(x) - \tilde g\|^2
        + \tfrac{s^2}{2R^2} \|x - \mu\|^2, \quad x \text{ in the box of pixels,}

    with s the standard deviation of the noise on the shared gradient and μ, R² mean and
    variance of the pixels (s = 0: no prior): the maximum of the posterior; a ``prior``
    has a full covariance in the place of R². Each step
    solves

    .. math:: (H + \tfrac{s^2}{R^2} I + \lambda \bar d I)\,\Delta =
        -J^T (g - \tilde g) - \tfrac{s^2}{R^2} (x - \mu), \qquad H = J^T J,

    over the box, with the damping λ relative to the mean diagonal d̄ of H (Levenberg
    1944; Marquardt 1963; Nocedal & Wright 2006, ch. 10), divided by up to 5 after
    steps that did what the model promised and raised after others (Nielsen 1999).
    Gauss–Newton converges quadratically to the exact image where first-order attacks
    crawl along directions that the gradient hardly shows, λ_i/λ_1 of 1e-6 and below.

    Three things make it find that image from a random start:

    - **Slopes of the logits.** Of a single image with a known label the shared gradient
      of the last bias *is* δ* = softmax(z) − e_y. First
      :math:`\sum_k \delta_k^* \nabla_\theta z_k(x)` is matched, which equals g̃ at the
      private image but lacks the exponentials that make the gradient of a confident
      network vary by orders of magnitude; see
      :func:`leakwatch.attacks.gauss_newton.objective.fixed_logit_gradient`.
    - **Smoothed kinks.** For ReLU networks J predicts next to nothing of the difference
      between two gradients, which comes from units that change sign;
      ``smoothed_relu`` adds their expected share, for a spread that
      shrinks with the residual. Steps may then go uphill now and then (Grippo,
      Lampariello & Lucidi 1986).
    - **The exact box.** Pixels pressed against their range drop out of the unknowns;
      images with a plain background leave few.

    Restarts are waves: targets that are matched take no part in the next. For ReLU
    networks a wave begins at the best image so far, shaken, where that is nearly right.

    Args:
        name: recorded in results.
        steps: at most, in each wave.
        damping: λ at the start.
        smoothing: spread of pre-activations as a part of their size, per unit of the
            relative residual; 0 for none.
        widest: most of that spread.
        memory: steps among which one may be uphill, ReLU networks only.
        patience: steps without 1 % of improvement after which an attack ends.
        method: ``"dense"``: H as a matrix, the model minimised exactly, H kept while
            steps go as predicted; ``"matrix-free"``: conjugate gradients on batched
            products; ``"auto"``: dense where J of one image takes no more than 256 MiB
            in float64 (measured at one thread: for the LeNet one H costs as much as 35
            to 100 iterations, for ResNet8 260).
        products: most iterations of conjugate gradients for one face of the box.
        forcing: relative rest at which they stop, far from the solution.
        logits: whether to start with the slopes of the logits, where they are known.
        tolerance: relative residual at which it ends. Default: rounding of the
            gradients that were shared.
        box: whether images are kept in the range of pixels, where that is known.
        prior_std: R, pixels. Default: that of pixels uniform on their range.
        prior_mean: μ, pixels, one sample. Default: the middle of the range.
        prior: mean and covariance of images, instead of both.
        fast: whether Jacobians are formed in float32; slopes and residuals never are.

    Raises:
        ValueError: for values that make no sense; quotes them.

    Example:
        >>> import torch
        >>> from leakwatch.attacks import PixelScale, SharedGradient, Start
        >>> from leakwatch.derivatives import GradientMap
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(8, 3)).double()
        >>> gradients = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(2, 6), torch.tensor([0, 2])
        >>> result = GaussNewton().run(
        ...     gradients, SharedGradient.of(gradients, x, y),
        ...     pixels=PixelScale(), start=Start.uniform(), seed=0, restarts=4)
        >>> bool((result.images - x).abs().max() < 1e-6)
        True
    """

    name: str = "gauss-newton"
    method: Method = "auto"
    products: int = 40
    forcing: float = 0.1
    logits: bool = True
    tolerance: float | None = None
    box: bool = True
    prior_std: float | None = None
    prior_mean: Float[Tensor, "*sample"] | None = None
    prior: GaussianPrior | None = None
    fast: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("products", self.products, example=40)
        check_choice("method", self.method, get_args(Method))
        check_number("forcing", self.forcing, example=0.1)
        if self.prior_std is not None:
            check_number("prior_std", self.prior_std, example=0.3)
        if self.prior is not None and (self.prior_std, self.prior_mean) != (None, None):
            raise ValueError(
                "prior has a mean and a covariance of its own; leave prior_std and "
                "prior_mean out."
            )

    def search(self, task: GradientTask) -> SearchResult:
        """Wave after wave; see the class.

        Restarts that were not needed return their first image and an infinite loss.
        """
        return Waves(self, task).run()

    def fit_to(
        self,
        sample_shape: tuple[int, ...],
        *,
        prior_std: float,
        prior_mean: Float[Tensor, "*sample"] | None,
        prior: GaussianPrior | None = None,
    ) -> Self:
        """With this prior, unless it has one of its own."""
        if self.prior_std is not None or self.prior is not None:
            return self
        if prior is not None and self.prior_mean is None:
            return replace(self, prior=prior)
        mean = prior_mean if self.prior_mean is None else self.prior_mean
        return replace(self, prior_std=prior_std, prior_mean=mean)


@final
class Waves:
    """One run's objectives and restarts; images are pixels, float64.

    Args:
        attack: the settings.
        task: what is given.

    Attributes:
        easier: the objective with the slopes of the logits, where they help.
        look_at: time of the clock at which targets are given up that have made no way
            until then; ``None`` for never.
    """

    look_at: float | None = None

    def __init__(self, attack: GaussNewton, task: GradientTask) -> None:
        self.attack, self.task = attack, task
        self.shared, self.pixels = task.shared, task.pixels
        shared, labels = task.shared, task.labels
        self.wave = 0
        self._clock, self._costs = Clock(task.deadline), Costs()
        target = shared.gradient.double()
        self.length = target.norm(dim=1).clamp_min(torch.finfo(target.dtype).tiny)
        noise = shared.noise_std * math.sqrt(target.shape[1]) / self.length
        # The MAP image leaves about the noise, a little less by what it fits of it.
        self.matched = (1.02 * noise).clamp_min(_EXACT)
        self.tolerance = attack.tolerance
        if self.tolerance is None:
            self.tolerance = 20 * float(torch.finfo(shared.gradient.dtype).eps)
        self.exact = self._objective(labels)
        self.easier: PosteriorObjective | None = None
        slopes = None
        if attack.logits and shared.images == 1:
            slopes = logit_slopes(task.gradients, shared, labels[:, 0])
        if slopes is not None and not self._mislead(slopes):
            self.easier = self._objective(
                slopes.double()[:, None], fixed_logit_gradient
            )

    @property
    def seconds_of_step(self) -> float:
        """About as long as a step of all targets takes; 0 where H is formed, briefly.

        Measured on products of one of them.
        """
        objective = self.exact if self.easier is None else self.easier
        if self._dense(objective):
            return 0.0
        one = torch.zeros(1, dtype=torch.long, device=self.length.device)
        p = self.first_images()[0, :1].flatten(1)
        u, width = objective.residual(one, p), torch.zeros_like(p[:, 0])
        began = time.perf_counter()
        objective.pull(one, p, objective.push(one, p, p, width) + u, width)
        pair = time.perf_counter() - began
        return pair * self.attack.products * self.shared.targets

    def first_images(self) -> Float[Tensor, "restarts targets images ..."]:
        """Where the waves begin, pixels."""
        x = self.task.first_images(
            box=self.attack.box,
            dtype=torch.float64,
            device=self.shared.gradient.device,
        )
        return self.pixels.to_pixels(x)

    def run(self) -> SearchResult:
        """All waves; targets that are matched take no part in the next."""
        first = self.first_images()
        images, losses = first.clone(), first.new_full(first.shape[:2], math.inf)
        taken = torch.zeros_like(losses, dtype=torch.long)
        every = torch.arange(self.shared.targets, device=first.device)
        heights = torch.full_like(losses, math.inf)
        late = torch.zeros_like(every, dtype=torch.bool)
        given_up = late.clone()
        pending = every
        if self.task.deadline is not None:
            # What a wave ends with, done before it: the first time it takes longest.
            for _ in range(2):
                if self.task.over:
                    late = torch.ones_like(losses, dtype=torch.bool)
                    return SearchResult(
                        self.pixels.to_input(images), losses, steps=taken, late=late
                    )
                began = time.perf_counter()
                self.reached(every, first[0])
            self._clock.after = time.perf_counter() - began
        for wave in range(self.task.restarts):
            self.wave = wave
            if wave:
                best = heights.argmin(0)
                rest = (2 * heights[best, every]).sqrt()
                self.kick(wave, first[wave], images[best, every], rest)
            ended = self.descend(pending, first[wave, pending].flatten(1))
            given_up[pending] = ended.given_up
            images[wave, pending] = ended.p.view(-1, *first.shape[2:])
            reached, height = self.reached(pending, images[wave, pending])
            losses[wave, pending] = 0.5 * (reached * self.length[pending]).square()
            heights[wave, pending] = height
            taken[wave, pending] = ended.steps
            late[pending] = ended.late
            pending = every[~self.solved(losses.min(0).values) & ~given_up]
            if len(pending) == 0 or self.task.over:
                break
        return SearchResult(
            images=self.pixels.to_input(images),
            loss=losses,
            steps=taken,
            rank=heights,
            late=late.expand_as(losses),
        )

    def kick(self, wave: int, first: Tensor, best: Tensor, rest: Tensor) -> None:
        """Begins from a shaken copy of the best image, where kinks hold it fast."""
        if not self.exact.kinked:
            return
        size = _KICKS[(wave - 1) % len(_KICKS)] * (self.pixels.data_range or 1.0)
        for i, name in enumerate(self.task.names):
            # Of noisy gradients the noise and the prior are part of it.
            if float(rest[i]) < max(_NEARLY, 1.2 * float(self.matched[i])):
                noise = torch.randn(
                    first.shape[1:],
                    dtype=torch.float64,
                    generator=stream(self.task.seed, name, wave, 2),
                )
                first[i] = best[i] + size * noise.to(first)

    def reached(
        self, targets: Int[Tensor, " some"], images: Tensor
    ) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
        """‖g − g̃‖/‖g̃‖ of some targets, and what restarts are compared by.

        That is the objective that was minimised last: of a confident network g itself
        leaves all bounds where a logit is a little wrong. Infinite for NaN.
        """
        p = images.flatten(1)
        r = self.exact.residual(targets, p)
        relative, objective = r.norm(dim=1), self.exact
        if self.easier is not None and self.shared.noise_std == 0:
            objective, r = self.easier, self.easier.residual(targets, p)
        both = torch.stack([relative, objective.value(targets, p, r)])
        rest, height = torch.nan_to_num(both, nan=math.inf, posinf=math.inf)
        return rest, height

    def solved(self, losses: Float[Tensor, " targets"]) -> Bool[Tensor, " targets"]:
        """Targets that another wave can't improve."""
        if self.shared.noise_std > 0 and self.exact.kinked:
            # Any image matches as far as noise allows; a higher posterior may be found.
            return torch.zeros_like(losses, dtype=torch.bool)
        matched: Tensor = (2 * losses).sqrt() / self.length <= self.matched
        return matched

    def descend(
        self, targets: Int[Tensor, " some"], p: Tensor
    ) -> LevenbergMarquardtResult:
        """One wave for some targets."""
        before = torch.zeros_like(targets)
        given_up = torch.zeros_like(targets, dtype=torch.bool)
        if self.easier is not None:
            ended = self._descend(self.easier, targets, p)
            images = ended.p
            rest, _ = self.reached(targets, images)
            if self.shared.noise_std == 0 or self.task.over or ended.given_up.all():
                return replace(ended, residual=rest)
            p, before, given_up = images, ended.steps, ended.given_up
        ended = self._descend(self.exact, targets, p)
        return replace(
            ended, steps=ended.steps + before, given_up=ended.given_up | given_up
        )

    def _descend(
        self, objective: PosteriorObjective, targets: Tensor, p: Tensor
    ) -> LevenbergMarquardtResult:
        a = self.attack
        how: DenseSteps | MatrixFreeSteps
        if self._dense(objective):
            how = DenseSteps(objective, self._clock.last_end, self._costs)
        else:
            how = MatrixFreeSteps(objective, a.products, a.forcing)
        assert self.tolerance is not None
        bounds = None
        low, high = self.pixels.low, self.pixels.high
        if a.box and low is not None and high is not None:
            bounds = low, high
        state = LevenbergMarquardt(
            objective, how, a, self.tolerance, targets, p, bounds
        )
        look_at, self.look_at = self.look_at, None
        return state.run(clock=self._clock, report=self._report, look_at=look_at)

    def _dense(self, objective: PosteriorObjective) -> bool:
        """Whether H is formed as a matrix."""
        method = self.attack.method
        numbers = self.shared.gradient.shape[1] * objective.size
        return method == "dense" or (method == "auto" and 8 * numbers <= _DENSE_BYTES)

    def _objective(
        self, labels: Tensor, criterion: Criterion | None = None
    ) -> PosteriorObjective:
        low, high = self.pixels.low, self.pixels.high
        std, mean = self.attack.prior_std, self.attack.prior_mean
        noise = self.shared.noise_std
        if mean is not None and not _broadcasts(mean, self.shared.sample_shape):
            raise ValueError(
                f"prior_mean must have the shape of one sample, "
                f"{tuple(self.shared.sample_shape)}, got {tuple(mean.shape)}."
            )
        if self.attack.prior is not None:
            self.attack.prior.check(tuple(self.shared.sample_shape))
        elif low is not None and high is not None:
            std = (high - low) * _UNIFORM_STD if std is None else std
            if mean is None:
                mean = torch.full(self.shared.sample_shape, (low + high) / 2)
        elif std is None:
            noise = 0.0
        return PosteriorObjective(
            self.task.gradients,
            self.shared.gradient,
            labels,
            sample_shape=self.shared.sample_shape,
            pixels=self.pixels,
            criterion=criterion,
            images=self.shared.images,
            noise_std=noise,
            prior_std=1.0 if std is None else std,
            prior_mean=mean,
            prior=self.attack.prior,
            fast=self.attack.fast,
        )

    def _mislead(self, slopes: Float[Tensor, "targets classes"]) -> bool:
        """Whether noise makes slopes of the logits worse than none."""
        noise_std = self.shared.noise_std
        if noise_std == 0:
            return False
        noise = noise_std * math.sqrt(slopes.shape[1])
        too_noisy = bool((noise > _NOISY * slopes.norm(dim=1)).any())
        return too_noisy or not self.task.start.practical

    def _report(self, step: int, residuals: Tensor) -> None:
        if self.task.progress is not None:
            done = self.wave * self.attack.steps + step
            total = self.task.restarts * self.attack.steps
            distance = 0.5 * residuals.median() ** 2
            self.task.progress(min(done, total), total, float(distance))


def _broadcasts(mean: Tensor, sample: tuple[int, ...]) -> bool:
    """Whether μ can be expanded to a sample."""
    missing = len(sample) - mean.ndim
    return missing >= 0 and all(
        own in (1, wanted)
        for own, wanted in zip(mean.shape, sample[missing:], strict=True)
    )

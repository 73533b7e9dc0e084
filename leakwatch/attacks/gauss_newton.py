"""A second-order attacker: Levenberg–Marquardt on the difference of gradients."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, fields, replace
from typing import Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.gn_descent import Descent, Found, Settings
from leakwatch.attacks.gn_objective import Objective
from leakwatch.attacks.gn_slopes import logit_slopes
from leakwatch.attacks.gn_steps import DenseSteps, MatrixFreeSteps
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.protocol import Progress
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.sharing import SharedGradient
from leakwatch.attacks.starts import Start, stream
from leakwatch.attacks.verdict import mismatch, uninformed, verdict
from leakwatch.gradients import GradientMap

__all__ = ["GaussNewton", "Method"]

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
class GaussNewton:
    r"""Finds the image whose gradient is the shared one, by Levenberg–Marquardt.

    Minimises

    .. math:: \tfrac12 \|g(x) - \tilde g\|^2
        + \tfrac{s^2}{2R^2} \|x - \mu\|^2, \quad x \text{ in the box of pixels,}

    with s the standard deviation of the noise on the shared gradient and μ, R² mean and
    variance of the pixels (s = 0: no prior): the maximum of the posterior. Each step
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
      :func:`leakwatch.attacks.gn_objective.fixed_logit_gradient`.
    - **Smoothed kinks.** For ReLU networks J predicts next to nothing of the difference
      between two gradients, which comes from units that change sign;
      :mod:`leakwatch.attacks.gn_kinks` adds their expected share, for a spread that
      shrinks with the residual. Steps may then go uphill now and then (Grippo,
      Lampariello & Lucidi 1986).
    - **The exact box.** Pixels pressed against their range drop out of the unknowns;
      images with a plain background leave few.

    Restarts are waves: targets that are matched take no part in the next. For ReLU
    networks a wave begins at the best image so far, shaken, where that is nearly right.

    Args:
        name: recorded in results.
        steps: at most, in each wave.
        method: ``"dense"``: H as a matrix, the model minimised exactly, H kept while
            steps go as predicted; ``"matrix-free"``: conjugate gradients on batched
            products; ``"auto"``: dense where J of one image takes no more than 256 MiB
            in float64 (measured at one thread: for the LeNet one H costs as much as 35
            to 100 iterations, for ResNet8 260).
        damping: λ at the start.
        products: most iterations of conjugate gradients for one face of the box.
        forcing: relative rest at which they stop, far from the solution.
        logits: whether to start with the slopes of the logits, where they are known.
        smoothing: spread of pre-activations as a part of their size, per unit of the
            relative residual; 0 for none.
        widest: most of that spread.
        memory: steps among which one may be uphill, ReLU networks only.
        patience: steps without 1 % of improvement after which an attack ends.
        tolerance: relative residual at which it ends. Default: rounding of the
            gradients that were shared.
        box: whether images are kept in the range of pixels, where that is known.
        prior_std: R, pixels. Default: that of pixels uniform on their range.
        prior_mean: μ, pixels, one sample. Default: the middle of the range.
        fast: whether Jacobians are formed in float32; slopes and residuals never are.

    Raises:
        ValueError: for values that make no sense; quotes them.

    Example:
        >>> import torch
        >>> from leakwatch.attacks import PixelScale, SharedGradient, Start
        >>> net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Sigmoid(),
        ...                           torch.nn.Linear(8, 3)).double()
        >>> gradients = GradientMap(net, dtype=torch.float64)
        >>> x, y = torch.rand(2, 6), torch.tensor([0, 2])
        >>> found = GaussNewton().run(
        ...     gradients, SharedGradient.of(gradients, x, y),
        ...     pixels=PixelScale(), start=Start.uniform(), seed=0, restarts=4)
        >>> bool((found.images - x).abs().max() < 1e-6)
        True
    """

    name: str = "gauss-newton"
    steps: int = 60
    method: Method = "auto"
    damping: float = 1e-2
    products: int = 40
    forcing: float = 0.1
    logits: bool = True
    smoothing: float = 0.3
    widest: float = 0.3
    memory: int = 4
    patience: int = 20
    tolerance: float | None = None
    box: bool = True
    prior_std: float | None = None
    prior_mean: Float[Tensor, "*sample"] | None = None
    fast: bool = True

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("products", 1), ("memory", 1)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name} must be at least {least}, got {getattr(self, name)}."
                )
        if self.method not in ("auto", "dense", "matrix-free"):
            raise ValueError(
                f"unknown method {self.method!r}; choose from auto, dense, matrix-free."
            )
        for name in ("damping", "forcing", "widest"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} must be positive and finite, got {value}.")
        if not (math.isfinite(self.smoothing) and self.smoothing >= 0):
            raise ValueError(
                f"smoothing must be finite and at least 0, got {self.smoothing}."
            )
        if self.prior_std is not None and not (
            math.isfinite(self.prior_std) and self.prior_std > 0
        ):
            raise ValueError(
                f"prior_std must be positive and finite, got {self.prior_std}."
            )

    def run(
        self,
        gradients: GradientMap,
        shared: SharedGradient,
        *,
        pixels: PixelScale,
        start: Start,
        seed: int = 0,
        restarts: int = 1,
        time_limit: float | None = None,
        progress: Progress | None = None,
        initial: Float[Tensor, "restarts targets images ..."] | None = None,
    ) -> Reconstruction:
        """Attacks all targets. See :class:`leakwatch.attacks.protocol.Attack`.

        Restarts that were not needed return their first image and an infinite loss.

        Raises:
            ValueError: if the shared gradients are not this module's, or ``initial``
                has another shape.
        """
        began = time.perf_counter()
        if restarts < 1:
            raise ValueError(f"restarts must be at least 1, got {restarts}.")
        if time_limit is not None and not time_limit > 0:
            raise ValueError(f"time_limit must be positive, got {time_limit} seconds.")
        if shared.gradient.shape[1] != gradients.size:
            raise ValueError(
                f"each shared gradient has {shared.gradient.shape[1]} entries, but "
                f"this module's has {gradients.size}; share the gradients of the same "
                f"module."
            )
        attempt = _Attempt(self, gradients, shared, pixels, start, progress)
        if time_limit is not None:
            attempt.deadline = began + time_limit
        first = attempt.first_images(seed, restarts, initial)
        images, losses = first.clone(), first.new_full(first.shape[:2], math.inf)
        taken = torch.zeros_like(losses, dtype=torch.long)
        every = torch.arange(shared.targets, device=first.device)
        heights = torch.full_like(losses, math.inf)
        late = torch.zeros_like(every, dtype=torch.bool)
        pending = every
        for wave in range(restarts):
            attempt.wave, attempt.waves = wave, restarts
            if wave:
                best = heights.argmin(0)
                rest = (2 * losses[best, every]).sqrt() / attempt.length
                attempt.kick(seed, wave, first[wave], images[best, every], rest)
            found = attempt.descent(pending, first[wave, pending].flatten(1))
            images[wave, pending] = found.p.view(-1, *first.shape[2:])
            reached, height = attempt.reached(pending, images[wave, pending])
            losses[wave, pending] = 0.5 * (reached * attempt.length[pending]).square()
            heights[wave, pending] = height
            taken[wave, pending] = found.steps
            late[pending] = found.late
            pending = every[~attempt.solved(losses.min(0).values)]
            if len(pending) == 0 or attempt.over:
                break
        best = heights.argmin(0)
        chosen = pixels.to_input(images)[best, every]
        rest, _ = mismatch(gradients, shared, chosen, attempt.labels)
        single = shared.images == 1
        device = next(gradients.module.parameters()).device
        labels = attempt.labels.to(device)
        chosen = chosen.to(device, gradients.dtype)
        return Reconstruction(
            images=chosen[:, 0] if single else chosen,
            labels=labels[:, 0] if single else labels,
            loss=losses[best, every].to(device),
            relative=rest,
            status=verdict(
                shared,
                rest,
                base=uninformed(gradients, shared, attempt.labels, pixels)[0],
                out_of_time=late.to(device),
                doubts=attempt.doubts,
            ),
            iterations=taken[best, every].to(device),
            restart_images=pixels.to_input(images).to(device, gradients.dtype),
            restart_loss=losses.to(device),
            seconds=time.perf_counter() - began,
            attack=self.name,
            start=start.name,
            practical=start.practical,
        )

    def changed(self, **changes: object) -> GaussNewton:
        """The same attack with other settings.

        Raises:
            ValueError: for a setting that there isn't; lists those that there are.

        Example:
            >>> GaussNewton().changed(steps=10).steps
            10
        """
        known = [f.name for f in fields(self)]
        unknown = changes.keys() - set(known)
        if unknown:
            raise ValueError(
                f"unknown setting {', '.join(sorted(unknown))} of attack "
                f"{self.name!r}; choose from {', '.join(known)}."
            )
        return replace(self, **changes)  # type: ignore[arg-type]


class _Attempt:
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
        size = (restarts, shared.targets, shared.images, *shared.sample_shape)
        if initial is None:
            x = self.start.draw(
                targets=shared.targets,
                images=shared.images,
                shape=shared.sample_shape,
                restarts=restarts,
                seed=seed,
                pixels=self.pixels,
                index=shared.index,
                dtype=torch.float64,
                device=shared.gradient.device,
            )
        elif tuple(initial.shape) == size and bool(torch.isfinite(initial).all()):
            x = initial.detach().to(shared.gradient.device, torch.float64)
        else:
            raise ValueError(
                f"initial must be finite images of shape (restarts, targets, images, "
                f"*sample) = {size}, got {tuple(initial.shape)}."
            )
        return self.pixels.to_pixels(self.pixels.clamp(x) if self.attack.box else x)

    def kick(
        self, seed: int, wave: int, first: Tensor, known: Tensor, rest: Tensor
    ) -> None:
        """Begins from a shaken copy of the best image, where kinks hold it fast."""
        if not self.exact.kinked:
            return
        size = _KICKS[(wave - 1) % len(_KICKS)] * self.range
        names = self.shared.index or range(self.shared.targets)
        for i, name in enumerate(names):
            if float(rest[i]) < max(_NEARLY, float(self.matched[i])):
                noise = torch.randn(
                    first.shape[1:],
                    dtype=torch.float64,
                    generator=stream(seed, name, wave, 2),
                )
                first[i] = known[i] + size * noise.to(first)

    def reached(
        self, targets: Int[Tensor, " some"], images: Tensor
    ) -> tuple[Float[Tensor, " some"], Float[Tensor, " some"]]:
        """‖g − g̃‖/‖g̃‖ and the objective of some targets, infinite for NaN."""
        p = images.flatten(1)
        r = self.exact.residual(targets, p)
        found = torch.stack([r.norm(dim=1), self.exact.value(targets, p, r)])
        rest, height = torch.nan_to_num(found, nan=math.inf, posinf=math.inf)
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
        before = torch.zeros(len(targets), dtype=torch.long)
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


def _labels(
    gradients: GradientMap, shared: SharedGradient
) -> tuple[Tensor, tuple[str, ...]]:
    """Labels ``(targets, images)``, and what may be wrong with them."""
    if shared.labels is not None:
        return shared.labels, ("",) * shared.targets
    from leakwatch.attacks.labels import infer_labels

    found = infer_labels(shared, gradients)
    return found.labels, tuple(
        "" if s.word == "ok" else f"The labels were inferred: {s}."
        for s in found.status
    )

"""A second-order attacker: Levenberg–Marquardt on the difference of gradients."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from leakwatch.attacks.base import Progress
from leakwatch.attacks.gauss_newton.run import Attempt
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.settings import refuse_unknown
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.verdict import mismatch, uninformed, verdict
from leakwatch.derivatives import GradientMap

__all__ = ["GaussNewton", "Method"]

Method = Literal["auto", "dense", "matrix-free"]


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
        for name, least in (
            ("steps", 1),
            ("products", 1),
            ("memory", 1),
            ("patience", 1),
        ):
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
        """Attacks all targets. See :class:`leakwatch.attacks.base.Attack`.

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
        attempt = Attempt(self, gradients, shared, pixels, start, progress)
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
                rest = (2 * heights[best, every]).sqrt()
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
        refuse_unknown(self.name, changes, self.__dataclass_fields__)
        return replace(self, **changes)  # type: ignore[arg-type]

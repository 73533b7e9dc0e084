"""A first-order attack to come near, Gauss–Newton to arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.gauss_newton import GaussNewton
from leakwatch.attacks.gn_objective import fixed_logit_gradient
from leakwatch.attacks.gn_slopes import logit_slopes
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.priors import Priors
from leakwatch.attacks.protocol import Progress
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.sharing import SharedGradient
from leakwatch.attacks.starts import Start
from leakwatch.gradients import GradientMap

__all__ = ["Combined"]

_TRIAL_STEPS = 10


@final
@dataclass(frozen=True)
class Combined:
    """Runs a first-order attack and begins Gauss–Newton at its images.

    Where the shared gradient states the slopes of the logits, the first attack matches
    the gradient of a loss that is linear in them, as Gauss–Newton does at first (see
    :func:`leakwatch.attacks.gn_objective.fixed_logit_gradient`): of residual networks
    this alone finds images that the cross-entropy's gradient hides. Its total variation
    leads past images that only look alike to the gradient; Gauss–Newton needs none.

    Args:
        name: recorded in results.
        first: comes near, in float32; under a time limit with as many steps as fit its
            share, so that its step size still falls to the end.
        second: arrives.
        share: part of the time limit that ``first`` may use, in (0, 1).

    Raises:
        ValueError: for a share outside of (0, 1).
    """

    name: str = "combined"
    first: FirstOrder = field(
        default_factory=lambda: FirstOrder(
            name="cosine", steps=1500, lr=0.1, priors=Priors(tv=1e-2)
        )
    )
    second: GaussNewton = field(default_factory=GaussNewton)
    share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"share must lie in (0, 1), got {self.share}.")

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
        """Attacks all targets. See :class:`leakwatch.attacks.protocol.Attack`."""
        began = time.perf_counter()
        problem = self.first_problem(gradients, shared)

        def approach(first: FirstOrder, limit: float | None) -> Reconstruction:
            return first.run(
                *problem,
                pixels=pixels,
                start=start,
                seed=seed,
                restarts=restarts,
                time_limit=limit,
                progress=None if first is trial else progress,
                initial=initial,
            )

        first, limit = self.first, None
        trial = first.changed(steps=_TRIAL_STEPS)
        if time_limit is not None:
            limit = self.share * time_limit
            tried = time.perf_counter()
            approach(trial, limit)
            each = (time.perf_counter() - tried) / _TRIAL_STEPS
            fits = (limit - (time.perf_counter() - began)) / each
            first = first.changed(steps=max(1, min(first.steps, int(fits))))
        near = approach(first, limit)
        # The best restart first: targets that it solves need no other.
        order = near.restart_loss.argsort(0)
        every = torch.arange(shared.targets, device=order.device)
        left = None
        if time_limit is not None:
            left = max(time_limit - (time.perf_counter() - began), 1e-3)
        found = self.second.run(
            gradients,
            shared,
            pixels=pixels,
            start=start,
            seed=seed,
            restarts=restarts,
            time_limit=left,
            progress=progress,
            initial=near.restart_images[order, every],
        )
        return replace(
            found,
            iterations=found.iterations + near.iterations,
            seconds=time.perf_counter() - began,
            attack=self.name,
        )

    def first_problem(
        self, gradients: GradientMap, shared: SharedGradient
    ) -> tuple[GradientMap, SharedGradient]:
        """What the first attack matches, in float32.

        Args:
            gradients: the map whose gradients were shared.
            shared: what was shared.

        Returns:
            A map and what it would have shared; with fixed slopes the position of a
            target takes the place of its label.
        """
        slopes = None
        if self.second.logits and shared.images == 1 and shared.labels is not None:
            slopes = logit_slopes(gradients, shared, shared.labels[:, 0])
        criterion = gradients.criterion
        gradient, labels = shared.gradient, shared.labels
        if slopes is not None:
            # Confident samples' gradients would leave the range of float32.
            size = slopes.norm(dim=1, keepdim=True).clamp_min(1e-300)
            criterion = _Slopes((slopes / size).float())
            gradient = gradient / size.to(gradient.device)
            labels = torch.arange(shared.targets, device=gradient.device)[:, None]
        easier = GradientMap(
            gradients.module,
            criterion,
            path=gradients.path,
            chunk_size=gradients.chunk_size,
        )
        return easier, replace(shared, gradient=gradient.float(), labels=labels)

    def changed(self, **changes: object) -> Combined:
        """The same attack with other settings.

        Args:
            changes: of this class; others go to the second attack.

        Raises:
            ValueError: for a setting that neither has.

        Example:
            >>> Combined().changed(share=0.5, steps=10).second.steps
            10
        """
        own = {f.name for f in fields(self)}
        mine = {k: v for k, v in changes.items() if k in own}
        rest = {k: v for k, v in changes.items() if k not in own}
        changed: Combined = replace(self, **mine)  # type: ignore[arg-type]
        return replace(changed, second=changed.second.changed(**rest))


@final
class _Slopes:
    """The loss with fixed slopes of the logits, target by target."""

    def __init__(self, slopes: Float[Tensor, "targets classes"]) -> None:
        self.slopes = slopes

    def __call__(
        self, module: nn.Module, x: Tensor, y: Int[Tensor, " batch"]
    ) -> Float[Tensor, " batch"]:
        """y: the target's position."""
        return fixed_logit_gradient(module, x, self.slopes.to(x)[y])

"""A first-order attack to come near, Gauss–Newton to arrive."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks.base import Progress
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.gauss_newton.attack import GaussNewton
from leakwatch.attacks.gauss_newton.objective import fixed_logit_gradient
from leakwatch.attacks.labels.slopes import logit_slopes
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.pixels import PixelScale
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.settings import refuse_unknown
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.start import Start
from leakwatch.attacks.verdict import mismatch
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime import Criterion

__all__ = ["Combined"]

_TRIAL_STEPS = 10

_Problem: TypeAlias = tuple[GradientMap, SharedGradient]


@final
@dataclass(frozen=True)
class Combined:
    """Runs a first-order attack and begins Gauss–Newton at its images.

    Where the shared gradient states the slopes of the logits, half of the restarts of
    the first attack match the gradient of a loss that is linear in them, as
    Gauss–Newton does at first (see
    ``fixed_logit_gradient`` in `leakwatch.attacks.gauss_newton`), and half that of the
    loss itself: on trained residual networks either finds images that the other does
    not. All are compared by the direction of the loss' gradient, and Gauss–Newton
    begins at the best.

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
            name="cosine", steps=1500, lr=0.1, priors=Priors(tv=1e-4)
        )
    )
    second: GaussNewton = field(default_factory=GaussNewton)
    share: float = 0.5

    def __post_init__(self) -> None:
        for what, kind in (("first", FirstOrder), ("second", GaussNewton)):
            given = getattr(self, what)
            if not isinstance(given, kind):
                raise TypeError(
                    f"{what} must be a {kind.__name__} attack, got {given!r}."
                )
        if self.first.joint_labels:
            raise ValueError(
                "first can't optimise labels (joint_labels), because Gauss-Newton "
                "needs them; use labels='inferred'."
            )
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
        """Attacks all targets. See :class:`leakwatch.attacks.base.Attack`."""
        began = time.perf_counter()
        problems = self.first_problems(gradients, shared)
        shares = _shares(restarts, len(problems))
        near: list[Reconstruction] = []
        done = 0
        for problem, count in zip(problems, shares, strict=True):
            if count == 0:
                continue
            given = None if initial is None else initial[done : done + count]
            limit = None
            if time_limit is not None:
                # What is left of the first attack's time, by restarts that are left.
                rest = self.share * time_limit - (time.perf_counter() - began)
                limit = max(rest * count / (restarts - done), 1e-3)
            near.append(
                self._approach(
                    problem,
                    limit,
                    pixels=pixels,
                    start=start,
                    # Streams are named by seed: no two restarts begin alike.
                    seed=seed + done,
                    restarts=count,
                    progress=progress,
                    initial=given,
                )
            )
            done += count
        images = torch.cat([found.restart_images for found in near])
        labels = shared.labels
        if labels is None:
            labels = near[-1].labels.view(shared.targets, shared.images)
        turned = torch.stack(
            [
                mismatch(gradients, shared, x.to(gradients.dtype), labels)[1]
                for x in images
            ]
        )
        # The best restart first: targets that it solves need no other.
        order = turned.argsort(0)
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
            initial=images[order, every],
        )
        return replace(
            found,
            iterations=found.iterations + sum(n.iterations for n in near),
            seconds=time.perf_counter() - began,
            attack=self.name,
        )

    def _approach(
        self,
        problem: _Problem,
        limit: float | None,
        *,
        progress: Progress | None,
        **how: Any,
    ) -> Reconstruction:
        """The first attack, with as many steps as fit its time."""
        first = self.first
        if limit is not None:
            clock = [time.perf_counter()]
            for steps in (1, 1 + _TRIAL_STEPS):
                trial = first.changed(steps=steps)
                trial.run(*problem, progress=None, time_limit=limit, **how)
                clock.append(time.perf_counter())
            once, more = clock[1] - clock[0], clock[2] - clock[1]
            each = max(more - once, 0.1 * more) / _TRIAL_STEPS
            left = limit - (clock[2] - clock[0])
            fits = int((left - min(once, more)) / each)
            first = first.changed(steps=max(1, min(first.steps, fits)))
            limit = max(left, 1e-3)
        return first.run(*problem, progress=progress, time_limit=limit, **how)

    def first_problems(
        self, gradients: GradientMap, shared: SharedGradient
    ) -> list[_Problem]:
        """What the first attack matches, in float32.

        Args:
            gradients: the map whose gradients were shared.
            shared: what was shared.

        Returns:
            Maps and what they would have shared: with fixed slopes, where they are
            known, and the loss' own. With fixed slopes the position of a target takes
            the place of its label.
        """

        def easier(criterion: Criterion, given: SharedGradient) -> _Problem:
            at = gradients.with_criterion(criterion, torch.float32)
            return at, replace(given, gradient=given.gradient.float())

        problems = [easier(gradients.criterion, shared)]
        slopes = None
        if self.second.logits and shared.images == 1 and shared.labels is not None:
            slopes = logit_slopes(gradients, shared, shared.labels[:, 0])
        if slopes is not None:
            # Confident samples' gradients would leave the range of float32.
            size = slopes.norm(dim=1, keepdim=True).clamp_min(1e-300)
            gradient = shared.gradient / size.to(shared.gradient.device)
            position = torch.arange(shared.targets, device=gradient.device)[:, None]
            left = (
                None if shared.left is None else shared.left / size[:, 0].to(gradient)
            )
            given = replace(shared, gradient=gradient, labels=position, left=left)
            problems.insert(0, easier(_Slopes((slopes / size).float()), given))
        return problems

    def changed(self, **changes: object) -> Combined:
        """The same attack with other settings.

        Args:
            changes: of this class; others go to each of the two attacks that has them.
                ``steps`` is a limit for both, the second's own stays if it is lower.

        Raises:
            ValueError: for a setting that neither has.

        Example:
            >>> changed = Combined().changed(share=0.4, steps=200, lr=0.05)
            >>> changed.first.steps, changed.second.steps, changed.first.lr
            (200, 60, 0.05)
        """
        own = {f.name for f in fields(self)}
        mine = {k: v for k, v in changes.items() if k in own}
        rest = {k: v for k, v in changes.items() if k not in own}
        changed: Combined = replace(self, **mine)  # type: ignore[arg-type]
        first, second = changed.first, changed.second
        if "steps" in rest:
            steps = rest.pop("steps")
            first = first.changed(steps=steps)
            if not isinstance(steps, int) or steps < second.steps:
                second = second.changed(steps=steps)
        theirs = {f.name for f in fields(second)} - {"name"}
        others = {f.name for f in fields(first)} | {f.name for f in fields(Priors)}
        refuse_unknown(self.name, rest, own | theirs | others)
        second = second.changed(**{k: v for k, v in rest.items() if k in theirs})
        both = {f.name for f in fields(first)} & theirs
        rest = {k: v for k, v in rest.items() if k not in theirs or k in both}
        first = first.changed(**rest)
        return replace(changed, first=first, second=second)


def _shares(restarts: int, problems: int) -> list[int]:
    """Restarts of each problem; with one restart the first has it."""
    counts = [restarts // problems] * problems
    for i in range(restarts % problems):
        counts[i] += 1
    return counts


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

"""A first-order attack to come near, Gauss–Newton to arrive."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeAlias, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from leakwatch.attacks.agreement import agreed
from leakwatch.attacks.base import (
    GradientAttack,
    GradientTask,
    SearchResult,
    refuse_unknown,
)
from leakwatch.attacks.coarse_to_fine import CoarseToFine
from leakwatch.attacks.first_order import FirstOrder
from leakwatch.attacks.gauss_newton.attack import GaussNewton, Waves
from leakwatch.attacks.gauss_newton.objective import fixed_logit_gradient
from leakwatch.attacks.labels.last_layer import logit_slopes
from leakwatch.attacks.matching.priors import Priors
from leakwatch.attacks.result import Reconstruction
from leakwatch.attacks.shared_gradient import SharedGradient
from leakwatch.attacks.tries import Tries
from leakwatch.attacks.verdict import limit_of_noise, mismatch
from leakwatch.checks import check_number
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime import Criterion
from leakwatch.priors import GaussianPrior

__all__ = ["Combined"]

_TRIAL_STEPS = 10
# Where this part of the gradient's length is left, beside what noise leaves,
# Gauss-Newton did not arrive; where it was not begun, there is nothing more to be done
# below the other part.
_ARRIVED, _SOLVED = 0.1, 1e-3
# Gauss-Newton has its time only if so many steps fit in, and if after this part of it
# it has made some way: it arrives in 10 to 20 steps, or not at all.
_FEWEST_STEPS, _LOOK = 8, 0.5
# Weight of an image's distance from the prior.
_UNLIKELY = 1e-3

_Problem: TypeAlias = tuple[GradientMap, SharedGradient]
_First: TypeAlias = FirstOrder | CoarseToFine


@final
@dataclass(frozen=True)
class Combined(GradientAttack):
    """Runs first-order attacks and begins Gauss–Newton at their images.

    Restarts take turns between attacks and problems: three of four descend on pixels,
    which is better for drawings, one from coarse to fine, which is better for
    photographs, and of which one is enough. No one weight of the total variation fits
    digits and photographs, so that those on pixels have different ones. Where the
    shared
    gradient states the slopes of the logits, one problem is the gradient of a loss that
    is linear in them, as Gauss–Newton has it at first (see ``fixed_logit_gradient`` in
    `leakwatch.attacks.gauss_newton`), and the other that of the loss itself: on trained
    residual networks either finds images that the other does not. All are compared by
    the direction of the loss' gradient, and Gauss–Newton begins at the best.

    Where Gauss–Newton does not arrive, it fits what kinks put in its way, and ruins the
    image. Then the first images stand. Under a time limit it is not tried where steps
    take too long for it to arrive, and given up where it makes no way; descents from
    coarse to fine and on pixels, those of the better weight, have what time is left.
    What is returned is what all tries agree upon, see `leakwatch.attacks.agreement`;
    next comes the image whose direction is nearest, with a little weight on how far it
    is from what photographs are like: noise in an image can match a gradient better
    than the image does.

    Args:
        name: recorded in results.
        first: comes near, in float32; under a time limit with as many steps as fit its
            share, so that its step size still falls to the end.
        weights: of total variation, for samples that are images: the second restart of
            ``first`` has the first of them, the third the last; empty: all have that
            of ``first``.
        coarse: the same, for samples that are images; ``None`` for ``first`` alone.
        second: arrives.
        share: part of the time limit that the first attacks may use, in (0, 1).

    Raises:
        ValueError: for a share outside of (0, 1).
    """

    name: str = "combined"
    first: FirstOrder = field(
        default_factory=lambda: FirstOrder(
            name="cosine", steps=1500, lr=0.1, priors=Priors(tv=1e-2)
        )
    )
    weights: tuple[float, ...] = (1e-4, 0.2)
    coarse: CoarseToFine | None = field(default_factory=CoarseToFine)
    second: GaussNewton = field(default_factory=GaussNewton)
    share: float = 0.5

    def __post_init__(self) -> None:
        for what, kind in (("first", FirstOrder), ("second", GaussNewton)):
            attack = getattr(self, what)
            if not isinstance(attack, kind):
                raise TypeError(
                    f"{what} must be a {kind.__name__} attack, got {attack!r}."
                )
        if self.first.joint_labels:
            raise ValueError(
                "first can't optimise labels (joint_labels), because Gauss-Newton "
                "needs them; use labels='inferred'."
            )
        check_number("share", self.share, "(0, 1)", example=0.5)
        for weight in self.weights:
            check_number("weights", weight, "[0, inf)", example=1e-2)

    def search(self, task: GradientTask) -> SearchResult:
        """Comes near by the first attacks, and goes on by the second."""
        ways = self._ways(task)
        counts = _shares(task.restarts, len(ways))
        near: list[Reconstruction] = []
        done, least = 0, 0.0
        limit = None if task.deadline is None else self.share * _seconds_left(task)
        began = time.perf_counter()
        for (problem, engine), count in zip(ways, counts, strict=True):
            if count == 0:
                continue
            left = None
            if limit is not None:
                # What is left of the first attack's time, by restarts that are left.
                rest = limit - (time.perf_counter() - began)
                if near and rest <= least:
                    break
                left = max(rest * count / (task.restarts - done), 1e-3)
            made, least = _approach(engine, problem, task, done, count, left)
            near.append(made)
            done += count
        steps = torch.stack([n.iterations for n in near]).sum(0)
        whose = [i for i, count in enumerate(counts) for _ in range(count)][:done]
        missing, task = task.restarts - done, replace(task, restarts=done)
        first = self._tries(task, torch.cat([n.restart_images for n in near]), whose)
        result, begun = self._arrive(task, first.sorted_by(first.turned))
        result = replace(result, steps=result.steps + steps.to(result.steps))
        rest = _ARRIVED if begun else _SOLVED
        lost = _lost(result, task.shared, rest).nonzero()[:, 0]
        if len(lost) > 0:
            lengths = task.shared.gradient.double().norm(dim=1)[lost]
            tries = self._given_up(task, ways, first.of(lost), lost, least)
            result = tries.into(result, lengths, lost)
        return _with_those_that_never_began(result, task, missing)

    def _arrive(self, task: GradientTask, near: Tries) -> tuple[SearchResult, bool]:
        """Gauss-Newton from these images, unless there is no time for it to arrive.

        Args:
            task: the run.
            near: images of the first attacks, the best restart first: targets that it
                solves need no other.

        Returns:
            What it came to, and whether it was begun.
        """
        waves = Waves(self.second, replace(task, initial=near.images))
        if task.deadline is None:
            return waves.run(), True
        left = _seconds_left(task)
        if waves.seconds_of_step * _FEWEST_STEPS > left:
            length = task.shared.gradient.double().norm(dim=1).to(near.relative)
            loss = 0.5 * (near.relative * length).square()
            none = torch.zeros_like(loss, dtype=torch.long)
            late = torch.ones_like(loss, dtype=torch.bool)
            return SearchResult(near.images, loss, steps=none, late=late), False
        waves.look_at = time.perf_counter() + _LOOK * left
        return waves.run(), True

    def _given_up(
        self,
        task: GradientTask,
        ways: list[tuple[_Problem, _First]],
        tries: Tries,
        lost: Int[Tensor, " lost"],
        least: float,
    ) -> Tries:
        """What is returned of targets at whose images Gauss-Newton does not arrive.

        What time is left goes to descents of two kinds, from coarse to fine and the
        best of the others; what all tries agree upon comes first.

        Args:
            task: the run.
            ways: of the first attacks.
            tries: the first images of these targets.
            lost: positions of the targets.
            least: seconds that another descent takes at least.
        """
        coarse = next(
            (i for i, way in enumerate(ways) if isinstance(way[1], CoarseToFine)), None
        )
        likeliest = tries.sorted_by(tries.unlikely)
        if coarse is None:
            return likeliest
        apart = torch.where(tries.way == coarse, math.inf, tries.unlikely)
        every = torch.arange(len(lost), device=apart.device)
        other = tries.way[apart.argmin(0), every]
        if bool((other == coarse).all()):
            other = torch.zeros_like(other)
        fresh = task.initial is None and task.start.practical
        if task.deadline is not None and fresh:
            tries = self._longer(task, ways, tries, lost, (coarse, other), least)
        likeliest = tries.sorted_by(tries.unlikely)
        pixels = task.pixels.to_pixels(tries.images.double())
        assert self.coarse is not None
        middle = agreed(pixels, tries.unlikely, self.coarse.spectrum(task))
        middle = task.pixels.clamp(task.pixels.to_input(middle))[None].to(tries.images)
        return self._tries(_part(task, lost), middle, [-1]).followed_by(likeliest)

    def _longer(
        self,
        task: GradientTask,
        ways: list[tuple[_Problem, _First]],
        tries: Tries,
        lost: Int[Tensor, " lost"],
        two: tuple[int, Int[Tensor, " lost"]],
        least: float,
    ) -> Tries:
        """Longer descents from new starts; arguments as above, and of which ways."""
        coarse, other = two
        plan = [(coarse, torch.arange(len(lost), device=other.device))]
        plan += [(i, (other == i).nonzero()[:, 0]) for i in set(other.tolist())]
        work = sum(len(rows) for _, rows in plan)
        for turn, (way, rows) in enumerate(plan):
            left = _seconds_left(task)
            if left <= least:
                break
            part = _part(task, lost[rows.to(lost.device)])
            (gradients, shared), engine = ways[way]
            device = shared.gradient.device
            given = shared.select(lost.to(device)[rows.to(device)])
            share = left * len(rows) / work
            work -= len(rows)
            seeds = task.restarts + turn
            made, _ = _approach(engine, (gradients, given), part, seeds, 1, share)
            found = self._tries(part, made.restart_images, [way])
            tries = tries.with_new(found, rows)
        return tries

    def _tries(self, task: GradientTask, images: Tensor, whose: list[int]) -> Tries:
        """Images with all that they are compared by.

        Args:
            task: of their targets.
            images: ``(tries, targets, images, ...)``.
            whose: the way of each try.
        """
        measured = [
            torch.stack(
                mismatch(
                    task.gradients, task.shared, x.to(task.gradients.dtype), task.labels
                )
            )
            for x in images
        ]
        relative, turned = torch.stack(measured, 1)
        unlikely = turned.square() / 2 + _UNLIKELY * self._distance(images, task)
        way = torch.tensor(whose, device=turned.device)
        return Tries(
            images, relative, turned, unlikely, way[:, None].expand(turned.shape)
        )

    def _distance(self, images: Tensor, task: GradientTask) -> Tensor:
        """How far images are from what the prior expects, 1 for typical ones."""
        shape = tuple(task.shared.sample_shape)
        if self.coarse is None or not self.coarse.fits(shape):
            return images.new_zeros(images.shape[:2])
        spectrum = self.coarse.spectrum(task)
        pixels = task.pixels.to_pixels(images.double()).flatten(3)
        apart = pixels - spectrum.mean.flatten().to(pixels)
        return (apart * spectrum.solve(apart)).mean((2, 3))

    def _ways(self, task: GradientTask) -> list[tuple[_Problem, _First]]:
        """Problems and attacks on them, in the order in which restarts take them."""
        problems = self.first_problems(task.gradients, task.shared)
        easier, own = problems[0], problems[-1]
        shape = tuple(task.shared.sample_shape)
        coarse = self.coarse
        if coarse is None or not coarse.fits(shape):
            return [(problem, self.first) for problem in problems]
        others = [self.first.changed(tv=weight) for weight in self.weights]
        second, third = (others or [self.first])[0], (others or [self.first])[-1]
        return [
            (easier, self.first),
            (own, coarse),
            (easier, second),
            (own, third),
        ]

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

        def easier(criterion: Criterion, message: SharedGradient) -> _Problem:
            at = gradients.with_criterion(criterion, torch.float32)
            return at, replace(message, gradient=message.gradient.float())

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
            message = replace(shared, gradient=gradient, labels=position, left=left)
            problems.insert(0, easier(_Slopes((slopes / size).float()), message))
        return problems

    def check(self, module: nn.Module) -> None:
        """Refuses what the first attack does."""
        self.first.check(module)

    def fit_to(
        self,
        sample_shape: tuple[int, ...],
        *,
        prior_std: float,
        prior_mean: Float[Tensor, "*sample"] | None,
        prior: GaussianPrior | None = None,
    ) -> Self:
        """With attacks that fit the samples."""
        return replace(
            self,
            first=self.first.fit_to(
                sample_shape, prior_std=prior_std, prior_mean=prior_mean, prior=prior
            ),
            coarse=self.coarse
            and self.coarse.fit_to(
                sample_shape, prior_std=prior_std, prior_mean=prior_mean, prior=prior
            ),
            second=self.second.fit_to(
                sample_shape, prior_std=prior_std, prior_mean=prior_mean, prior=prior
            ),
        )

    def changed(self, **settings: object) -> Self:
        """The same attack with other settings.

        Args:
            settings: of this class; others go to ``first`` and ``second`` as far as
                these have them. ``steps`` is a limit for all, that of ``second`` stays
                if it is lower; with ``tv`` all restarts have that weight.

        Raises:
            ValueError: for a setting that neither has.

        Example:
            >>> changed = Combined().changed(share=0.4, steps=200, lr=0.05)
            >>> changed.first.steps, changed.second.steps, changed.first.lr
            (200, 60, 0.05)
        """
        own = self.setting_names()
        both = {k: v for k, v in settings.items() if k not in own}
        changed = super().changed(**{k: settings[k] for k in settings.keys() & own})
        first, second = changed.first, changed.second
        firsts = set(first.setting_names())
        seconds = {*second.setting_names()} - {"name"}
        coarse = changed.coarse
        if coarse is not None and "steps" in both:
            coarse = coarse.changed(steps=both["steps"])
        refuse_unknown(self.name, both, {*own, *firsts, *seconds})
        first = first.changed(**{k: both[k] for k in both.keys() & firsts})
        weights = () if "tv" in both else changed.weights
        steps = both.get("steps")
        if isinstance(steps, int) and steps >= second.steps:
            seconds.remove("steps")
        second = second.changed(**{k: both[k] for k in both.keys() & seconds})
        return replace(
            changed, first=first, weights=weights, coarse=coarse, second=second
        )


def _approach(
    first: _First,
    problem: _Problem,
    task: GradientTask,
    done: int,
    count: int,
    limit: float | None,
) -> tuple[Reconstruction, float]:
    """A first attack from some starts, with as many steps as fit its time.

    Returns:
        What it came to; and the seconds that a single step of it takes, with what
        prepares it, under a time limit.
    """
    initial = task.initial
    how: dict[str, Any] = {
        "pixels": task.pixels,
        "start": task.start,
        # Streams are named by seed: no two restarts begin alike.
        "seed": task.seed + done,
        "restarts": count,
        "initial": None if initial is None else initial[done : done + count],
    }
    once = 0.0
    if limit is not None:
        took: list[float] = []
        for steps in (1, 1 + _TRIAL_STEPS):
            began = time.perf_counter()
            left = limit - sum(took)
            made = first.changed(steps=steps).run(*problem, time_limit=left, **how)
            took.append(time.perf_counter() - began)
            # Neither preparing another run nor its steps would fit.
            if sum(took) + max(took) > limit:
                return made, took[0]
        once, more = took
        each = max(more - once, 0.1 * more) / _TRIAL_STEPS
        left = limit - once - more
        fits = int((left - min(once, more)) / each)
        first = first.changed(steps=max(1, min(first.steps, fits)))
        limit = left
    made = first.run(*problem, progress=task.progress, time_limit=limit, **how)
    return made, once


def _with_those_that_never_began(
    result: SearchResult, task: GradientTask, missing: int
) -> SearchResult:
    """A result with the first images of restarts for which there was no time."""
    if missing == 0:
        return result
    begun = task.restarts
    every = replace(task, restarts=begun + missing)
    first = every.first_images(box=True)[begun:].to(result.images)

    def more(t: Tensor, fill: float) -> Tensor:
        return torch.cat([t, t.new_full((missing, *t.shape[1:]), fill)])

    rank = result.loss if result.rank is None else result.rank
    late = torch.ones_like(result.loss, dtype=torch.bool)
    return replace(
        result,
        images=torch.cat([result.images, first]),
        loss=more(result.loss, math.inf),
        steps=more(result.steps, 0),
        rank=more(rank, math.inf),
        late=more(late, True),
        diverged=None,
        history=None,
    )


def _lost(
    result: SearchResult, shared: SharedGradient, rest: float = _ARRIVED
) -> Bool[Tensor, " targets"]:
    """Targets with this part of the gradient unmatched, beside what noise leaves."""
    length = shared.gradient.double().norm(dim=1).clamp_min(1e-300)
    left = (2 * result.loss.double()).sqrt().min(0).values / length.to(result.loss)
    limit = (limit_of_noise(shared).square() + rest**2).sqrt()
    lost: Tensor = left > limit.to(left)
    return lost


def _part(task: GradientTask, targets: Int[Tensor, " some"]) -> GradientTask:
    """The run for some targets, from new starts."""
    return replace(
        task,
        shared=task.shared.select(targets.to(task.shared.gradient.device)),
        labels=task.labels[targets.to(task.labels.device)],
        initial=None,
    )


def _seconds_left(task: GradientTask) -> float:
    assert task.deadline is not None
    return task.deadline - time.perf_counter()


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

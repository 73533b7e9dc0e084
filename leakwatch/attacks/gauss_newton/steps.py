"""One Levenberg–Marquardt step of each attack: where the damped model is least."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from leakwatch.attacks.gauss_newton.objective import PosteriorObjective
from leakwatch.attacks.gauss_newton.subproblems import Product, conjugate_gradients
from leakwatch.priors import CosinePrior, MeasuredPrior
from leakwatch.spectrum.box import minimum_in_box

__all__ = ["Costs", "DenseSteps", "Iterates", "MatrixFreeSteps", "Steps"]

_PROBES = 2
_FACES = 2
_SHORTENINGS = 4


@final
@dataclass(frozen=True, eq=False)
class Iterates:
    """Where attacks are, and what is known there; one row each.

    Rows may be on the CPU, from where a GPU is told and never asked.

    Attributes:
        rows: positions in the objective.
        p: images, pixels, flat.
        residual: (g − g̃)/‖g̃‖.
        slope: ∇φ.
        width: τ of the kinks.
    """

    rows: Int[Tensor, " rows"]
    p: Float[Tensor, "rows n"]
    residual: Float[Tensor, "rows d_theta"]
    slope: Float[Tensor, "rows n"]
    width: Float[Tensor, " rows"]

    def select(self, which: Tensor) -> Iterates:
        """Some of the rows."""
        return Iterates(*(t[which] for t in vars(self).values()))

    def in_one_place(self) -> Iterates:
        """All where the images are."""
        return Iterates(*(t.to(self.p.device) for t in vars(self).values()))


class Steps(Protocol):
    """A way to find the next images."""

    def renew(self, rows: Int[Tensor, " rows"]) -> None:
        """Forgets what belongs to an image, of attacks that move on."""

    def forget(self, rows: Int[Tensor, " rows"]) -> None:
        """Frees memory of attacks that ended."""

    def step(
        self,
        at: Iterates,
        damping: Float[Tensor, " rows"],
        bounds: tuple[float, float] | None,
    ) -> tuple[Float[Tensor, "rows n"], Float[Tensor, " rows"]]:
        """The next images and the decrease of φ that the model predicts.

        Args:
            at: where the attacks are.
            damping: relative to the mean diagonal of H, on any device.
            bounds: of pixels, ``None`` for no box.
        """

    def stale(self, rows: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
        """Whether the last step used a Jacobian of an earlier image."""


@final
@dataclass
class Costs:
    """What parts of a dense step took the last time, for all waves of a run.

    Attributes:
        forming: seconds for H of one attack; 0 before the first.
        solving: seconds for the model of one attack; 0 before the first.
    """

    forming: float = 0.0
    solving: float = 0.0


@final
class DenseSteps:
    """From H as a matrix of each attack; kept until it fails.

    With exact arithmetic for the slope an H of an earlier image still gives a descent
    direction (Shamanskii 1967): steps after the first cost one vjp and a factorisation.
    """

    def __init__(
        self,
        objective: PosteriorObjective,
        deadline: float | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.objective, self.deadline = objective, deadline
        self._grams: dict[int, Tensor] = {}
        self._age: dict[int, int] = {}
        self._costs = Costs() if costs is None else costs
        self.formed = 0

    def renew(self, rows: Tensor) -> None:
        """Forgets H of these attacks."""
        for row in rows.tolist():
            self._grams.pop(row, None)

    def stale(self, rows: Tensor) -> Tensor:
        """Whether H was formed before the last step."""
        ages = [self._age.get(row, 0) > 0 for row in rows.tolist()]
        return torch.tensor(ages, device=rows.device)

    forget = renew

    def step(
        self, at: Iterates, damping: Tensor, bounds: tuple[float, float] | None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Steps`."""
        rows = at.rows.tolist()
        trial = at.p.clone()
        predicted = trial.new_zeros(len(rows))
        # On a GPU all together, or each look at one would wait for it.
        together = 1 if trial.device.type == "cpu" else len(rows)
        for start in range(0, len(rows), together):
            some = range(start, min(start + together, len(rows)))
            taken = self._formed(at, [(i, rows[i]) for i in some])
            if not taken:
                break
            began, part = time.perf_counter(), slice(start, start + len(taken))
            h = torch.stack(taken)
            size = damping[part].to(h) * h.diagonal(dim1=1, dim2=2).mean(1)
            m = h.clone()
            m.diagonal(dim1=1, dim2=2).add_(size[:, None])
            b = at.slope[part]
            delta = minimum_in_box(m, b, *_room(at.p[part], bounds))
            # Where H is not finite nothing is known of a better image.
            known = h.sum((1, 2)).isfinite()
            delta = torch.where(known[:, None], delta, 0.0)
            moved = (h @ delta[:, :, None])[:, :, 0]
            decrease = -((b + 0.5 * moved) * delta).sum(1)
            trial[part] += delta
            predicted[part] = torch.where(known, decrease, 0.0)
            self._costs.solving = (time.perf_counter() - began) / len(taken)
        return _boxed(trial, bounds), predicted

    def _formed(self, at: Iterates, some: list[tuple[int, int]]) -> list[Tensor]:
        """H of attacks, by place and row; of as many as there is time for."""
        o = self.objective
        found: list[Tensor] = []
        for i, row in some:
            self._age[row] = self._age.get(row, 0) + 1
            began, new = time.perf_counter(), row not in self._grams
            takes = (len(found) + 1) * self._costs.solving + new * self._costs.forming
            if self.deadline is not None and began + takes > self.deadline:
                break
            if new:
                h = o.gram(row, at.p[i], at.width[i])
                o.add_prior(row, h)
                self._grams[row], self._age[row] = h, 0
                self.formed += 1
                self._costs.forming = time.perf_counter() - began
            found.append(self._grams[row])
        return found


@final
class MatrixFreeSteps:
    """By conjugate gradients on batched products, one face of the box after the other.

    Where a step leaves the box it is bent back, and a second round of conjugate
    gradients moves the pixels that are still free (Moré & Toraldo 1991).
    """

    def __init__(
        self, objective: PosteriorObjective, products: int, forcing: float
    ) -> None:
        self.objective, self.products, self.forcing = objective, products, forcing
        self._diagonal: dict[int, float] = {}

    def renew(self, rows: Tensor) -> None:
        """Forgets the diagonals."""
        for row in rows.tolist():
            self._diagonal.pop(row, None)

    def stale(self, rows: Tensor) -> Tensor:
        """Never: products are always with the present J."""
        return torch.zeros_like(rows, dtype=torch.bool)

    def forget(self, rows: Tensor) -> None:
        """Nothing is kept that takes memory."""

    def step(
        self, at: Iterates, damping: Tensor, bounds: tuple[float, float] | None
    ) -> tuple[Tensor, Tensor]:
        """See :class:`Steps`."""
        o, at = self.objective, at.in_one_place()
        damping = damping.to(at.p.device)
        damp = damping * self.mean_diagonal(at)
        # Independent pixels are a shift, and cost no product.
        shift = damp + o.weight[at.rows] if o.prior is None else damp
        trial, linear, b = at.p.clone(), at.residual.clone(), at.slope.clone()
        start = o.value(at.rows, at.p, at.residual)
        model = torch.zeros_like(start)
        go = torch.arange(len(at.rows), device=at.p.device)
        for _ in range(_FACES):
            part = at.select(go)
            delta = self._solve(part, b[go], shift[go], _free(trial[go], b[go], bounds))
            bent = torch.zeros_like(go, dtype=torch.bool)
            left, length = torch.arange(len(go), device=go.device), 1.0
            for _ in range(_SHORTENINGS):
                k = go[left]
                want = trial[k] + length * delta[left]
                new = _boxed(want, bounds)
                some = at.select(k)
                lin = linear[k] + o.push(some.rows, some.p, new - trial[k], some.width)
                away = (new - some.p).square().sum(1)
                m = o.value(some.rows, new, lin) - start[k] + 0.5 * damp[k] * away
                ok = m < model[k]
                y = k[ok]
                bent[left[ok]] = ((want != new).any(1) | (length < 1))[ok]
                trial[y], linear[y], model[y] = new[ok], lin[ok], m[ok]
                left = left[~ok]
                if len(left) == 0:
                    break
                length *= 0.3
            go = go[bent]
            if len(go) == 0:
                break
            part = at.select(go)
            b[go] = (
                o.pull(part.rows, part.p, linear[go], part.width)
                + o.pulled_back(part.rows, trial[go])
                + damp[go, None] * (trial[go] - part.p)
            )
        return trial, start - o.value(at.rows, trial, linear)

    def _solve(self, at: Iterates, b: Tensor, shift: Tensor, free: Tensor) -> Tensor:
        o = self.objective

        def product(which: Tensor, v: Tensor) -> Tensor:
            some = at.select(which)
            u = o.push(some.rows, some.p, v, some.width)
            out = o.pull(some.rows, some.p, u, some.width)
            if o.prior is not None:
                out = out + o.weight[some.rows, None] * o.stiffness(v)
            return out

        tolerance = at.residual.norm(dim=1).sqrt() * self.forcing
        tolerance = tolerance.clamp(1e-6, self.forcing)
        return conjugate_gradients(
            product,
            -b,
            shift,
            free,
            tolerance=tolerance,
            most=self.products,
            inverse=self._inverse(at, shift),
        )[0]

    def _inverse(self, at: Iterates, shift: Tensor) -> Product | None:
        """The inverse with the mean diagonal in the place of H.

        Fine detail hardly varies in images: C⁻¹ has a condition of 1e4 and more.
        """
        prior = self.objective.prior
        if isinstance(prior, MeasuredPrior):
            prior = prior.spectrum
        if not isinstance(prior, CosinePrior) or self.objective.images != 1:
            return None
        variance = prior.variance.flatten().to(at.p)
        level = self.mean_diagonal(at) + shift
        weight = self.objective.weight[at.rows]
        gain = 1 / (level[:, None] + weight[:, None] / variance)

        def inverse(which: Tensor, v: Tensor) -> Tensor:
            return prior.images(gain[which] * prior.coefficients(v))

        return inverse

    def mean_diagonal(self, at: Iterates) -> Float[Tensor, " rows"]:
        """Of H, by Hutchinson's estimate with the same probes for all."""
        unknown = [i for i, r in enumerate(at.rows.tolist()) if r not in self._diagonal]
        if unknown:
            part = at.select(torch.tensor(unknown, device=at.p.device))
            generator = torch.Generator().manual_seed(0)
            total = part.p.new_zeros(len(unknown))
            for _ in range(_PROBES):
                v = torch.randint(0, 2, at.p.shape[1:], generator=generator)
                v = (2.0 * v - 1.0).to(at.p).expand_as(part.p)
                image = self.objective.push(part.rows, part.p, v, part.width)
                total += image.square().sum(1) / (_PROBES * at.p.shape[1])
            self._diagonal |= dict(zip(part.rows.tolist(), total.tolist(), strict=True))
        return at.p.new_tensor(
            [max(self._diagonal[r], 1e-300) for r in at.rows.tolist()]
        )


def _boxed(p: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    return p if bounds is None else p.clamp(*bounds)


def _room(p: Tensor, bounds: tuple[float, float] | None) -> tuple[Tensor, Tensor]:
    """How far each pixel may move down and up."""
    if bounds is None:
        far = torch.full_like(p, torch.inf)
        return -far, far
    return (bounds[0] - p).clamp_max(0), (bounds[1] - p).clamp_min(0)


def _free(p: Tensor, slope: Tensor, bounds: tuple[float, float] | None) -> Tensor:
    """Pixels that are not pressed against the box (Bertsekas 1982)."""
    if bounds is None:
        return torch.ones_like(p, dtype=torch.bool)
    tiny = 1e-9 * (bounds[1] - bounds[0])
    return ~(
        (p <= bounds[0] + tiny) & (slope > 0) | (p >= bounds[1] - tiny) & (slope < 0)
    )

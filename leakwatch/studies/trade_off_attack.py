"""Attacks on the messages of one network, by who knows what of the defense."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor, nn

from leakwatch.attacks import Attack, GaussNewton, PixelScale, SharedGradient, Start
from leakwatch.attacks.starts import StartKind
from leakwatch.defenses import Defense, Observation, Samples, Shared, predicted_errors
from leakwatch.gradients import Criterion, GradientMap
from leakwatch.quality import quality
from leakwatch.quality.perceptual import LpipsNet, weights_file
from leakwatch.status import OK, Status, describe_error
from leakwatch.studies.trade_off_knowledge import (
    NotComputedError,
    informed,
    plain,
    reimagined,
    share,
    tells_all,
)
from leakwatch.studies.trade_off_outcomes import (
    ATTACKERS,
    Attacked,
    Attacker,
    Outcome,
)

__all__ = ["CEILING", "ProbeAttack"]

#: PSNR from which on float64 can't tell a prediction from an exact recovery, dB.
CEILING: Final = -20 * math.log10(torch.finfo(torch.float64).eps)

# By this factor the rest may exceed what the true image leaves: an attack that did not
# even come so far says nothing about the sample.
_MATCHED: Final = 1.1
_LPIPS: Final[tuple[LpipsNet, ...]] = ("alex", "vgg", "squeeze")


@final
@dataclass(frozen=True, eq=False)
class ProbeAttack:
    """The same attack on the messages of the same samples, whatever shared them.

    Every sample is a message of its own: a client with one sample, the worst case.

    Attributes:
        x: network inputs, ``(n, ...)``.
        y: their labels.
        index: data-set indices.
        engine: the attack; a :class:`leakwatch.attacks.GaussNewton` without a prior
            gets that of the samples.
        attackers: who attacks.
        start: where attacks begin.
        radius: distance of a near start, network-input units.
        restarts: tries for each message.
        mean: per channel, of the normalisation.
        std: the same.
        data_range: largest pixel value, the smallest being 0.
        prior_std: R, pixel units.
        prior_mean: μ, pixel units; ``None``: mid-grey.
        criterion: one loss per sample.
    """

    x: Tensor
    y: Tensor
    index: tuple[int, ...]
    engine: Attack
    attackers: tuple[Attacker, ...]
    start: StartKind
    radius: float
    restarts: int
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    data_range: float
    prior_std: float
    prior_mean: Tensor | None
    criterion: Criterion | None

    @property
    def scale(self) -> float:
        """Pixels per unit of the network's input: root mean square over channels."""
        if self.std is None:
            return 1.0
        return math.sqrt(sum(s**2 for s in self.std) / len(self.std))

    def check(self, net: nn.Module) -> None:
        """Raises where the samples can't be attacked, before anything is trained.

        Raises:
            TypeError: as :meth:`leakwatch.GradientMap.check`.
            ValueError: the same; and for indices, a start, or pixels that don't fit.
        """
        if len(self.index) != len(self.x) or len(set(self.index)) != len(self.x):
            raise ValueError(
                f"index must hold a different number for each of the {len(self.x)} "
                f"samples, got {list(self.index)}."
            )
        device = next(net.parameters()).device
        x, y = self.x.to(device), self.y.to(device)
        GradientMap(net, self.criterion).check(x, y)
        self._start(x[:1])
        # Says so where the pixels of the originals are out of their range.
        self._quality(x, x)

    def run(
        self, net: nn.Module, defense: Defense | None, seed: int
    ) -> tuple[Attacked, ...]:
        """Shares the gradient of every sample once, and attacks all messages.

        Args:
            net: the network.
            defense: ``None`` for none.
            seed: of its noise and of the attacks' starts.
        """
        gradients = GradientMap(net, self.criterion, dtype=torch.float64)
        device = next(net.parameters()).device
        samples = Samples(gradients, self.x.double().to(device), self.y.to(device))
        shared = share(defense, samples, seed)
        predicted = self._predicted(shared, samples)
        norms = shared.clean.double().norm(dim=1).tolist()
        deltas = shared.delta.double().norm(dim=1).tolist()
        return tuple(
            Attacked(
                self.index[row],
                int(self.y[row]),
                norms[row],
                deltas[row],
                dict(self._outcomes(shared, samples, defense, row, seed, predicted)),
            )
            for row in range(len(samples))
        )

    def _outcomes(
        self,
        shared: Shared,
        samples: Samples,
        defense: Defense | None,
        row: int,
        seed: int,
        predicted: dict[Attacker, list[float]],
    ) -> Iterator[tuple[Attacker, Outcome]]:
        naive: tuple[Outcome, Tensor] | None = None

        def measured(who: Attacker) -> Outcome:
            nonlocal naive
            if who == "naive":
                naive = self._attack(plain(samples, shared, row), samples, row, seed)
                return naive[0]
            if naive is not None and tells_all(shared):
                return naive[0]
            if who == "adaptive" or defense is None or defense.needs != "jacobian":
                given = informed(samples, shared, row)
            elif naive is None:
                raise NotComputedError("the naive attack that it begins with failed.")
            else:
                given = reimagined(defense, shared, samples, row, naive[1], seed)
            return self._attack(given, samples, row, seed)[0]

        for who in self._in_order:
            try:
                found = measured(who)
            except NotComputedError as error:
                found = Outcome.without(Status("not computed", str(error)))
            except Exception as error:
                found = Outcome.without(Status("failed", describe_error(error)))
            if who in self.attackers:
                expected = predicted[who][row] if who in predicted else math.nan
                yield who, replace(found, predicted=expected)

    @property
    def _in_order(self) -> tuple[Attacker, ...]:
        """Those who attack, and the naive one before who begins with its image."""
        needed: set[Attacker] = set(self.attackers)
        if "estimating" in needed:
            needed.add("naive")
        return tuple(who for who in ATTACKERS if who in needed)

    def _attack(
        self, given: Observation, samples: Samples, row: int, seed: int
    ) -> tuple[Outcome, Tensor]:
        x, y = samples.x[row : row + 1], samples.y[row : row + 1]
        pixels = self._pixels()
        found = self._engine(given).run(
            given.gradients,
            SharedGradient(
                given.message,
                y[:, None],
                tuple(x.shape[1:]),
                noise_std=given.noise_std,
                index=(self.index[row],),
            ),
            pixels=pixels,
            start=self._start(x),
            seed=seed,
            restarts=self.restarts,
        )
        measured = self._quality(found.images, x)
        truth = given.gradients(x, y) - given.message
        left = float(truth.norm() / given.message.norm().clamp_min(1e-300))
        status = found.status[0]
        if status.word != "failed":
            status = _conclusive(float(found.relative[0]), left)
        if not status.usable:
            return Outcome.without(status), found.images
        return Outcome(*measured, predicted=math.nan), found.images

    def _start(self, x: Tensor) -> Start:
        near = self.start == "near"
        return Start.near(x, self.radius) if near else Start(self.start)

    def _engine(self, given: Observation) -> Attack:
        engine = self.engine
        if isinstance(engine, GaussNewton) and engine.prior_std is None:
            own = engine.prior_mean
            engine = replace(
                engine,
                prior_std=self.prior_std,
                prior_mean=self.prior_mean if own is None else own,
            )
        if given.distance == "l2":
            return engine
        try:
            changed: Attack = engine.changed(distance="cosine")  # type: ignore[attr-defined]
        except (AttributeError, ValueError) as error:
            raise NotComputedError(
                f"what is left of this message is its direction, which the attack "
                f"{engine.name!r} can't match; use one with distance='cosine'."
            ) from error
        return changed

    def _pixels(self) -> PixelScale:
        return PixelScale(self.mean, self.std, low=0.0, high=self.data_range)

    def _quality(self, images: Tensor, x: Tensor) -> tuple[float, float]:
        name = f"lpips_{_lpips_net()}"
        found = quality(
            images.cpu().double(),
            x.cpu(),
            pixels=self._pixels(),
            data_range=self.data_range,
            metrics=("psnr", name) if x.ndim == 4 else ("psnr",),
        )
        known = name in found
        return float(found["psnr"][0]), float(found[name][0]) if known else math.nan

    def _predicted(
        self, shared: Shared, samples: Samples
    ) -> dict[Attacker, list[float]]:
        """PSNR by attacker and message; nothing where there is no prediction."""
        try:
            found = predicted_errors(
                shared, samples, prior_std=self.prior_std / self.scale
            )
        except ValueError:
            return {}
        d_x = samples.x[0].numel()
        return {
            "naive": [self._decibels(e / d_x) for e in found.naive.tolist()],
            "adaptive": [self._decibels(e / d_x) for e in found.adaptive.tolist()],
        }

    def _decibels(self, error: float) -> float:
        """PSNR of a mean squared error in squared network-input units."""
        if math.isnan(error):
            return math.nan
        mse = error * (self.scale / self.data_range) ** 2
        return CEILING if mse <= 0 else min(CEILING, -10 * math.log10(mse))


def _conclusive(rest: float, left: float) -> Status:
    """Whether an attack matched its message as well as the truth does.

    Args:
        rest: ‖L g(x̂) − L g̃‖ over ‖L g̃‖.
        left: the same at the private image.
    """
    if rest <= _MATCHED * left + 1e-3:
        return OK
    return Status(
        "not converged",
        f"the attack left {rest:.2g} of the message unmatched, where the private image "
        f"leaves {left:.2g}; it needs more steps or restarts. That it failed does not "
        f"say that the sample is safe.",
    )


def _lpips_net() -> LpipsNet:
    """The first network whose weights are here; the smallest if none are."""
    here = [net for net in _LPIPS if weights_file(net).is_file()]
    return here[0] if here else _LPIPS[-1]

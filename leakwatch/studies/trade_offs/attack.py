"""Attacks on the messages of one network, by who knows what of the defense."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from leakwatch.attacks import Attack, PixelScale, SharedGradient, Start
from leakwatch.attacks.base import BaseAttack
from leakwatch.attacks.start import StartKind
from leakwatch.attacks.verdict import uninformed
from leakwatch.checks import check_classes
from leakwatch.defenses import Defense, Observation, Samples
from leakwatch.defenses.mixing import estimate
from leakwatch.derivatives import Criterion, GradientMap, Prepare
from leakwatch.priors import GaussianPrior
from leakwatch.probes.checks import check_index
from leakwatch.quality import quality
from leakwatch.status import OK, Status, describe_error
from leakwatch.studies.trade_offs.attackers import (
    Aim,
    Answers,
    NotComputedError,
    informed,
    mixtures,
    plain,
    reimagined,
    share,
    tells_all,
)
from leakwatch.studies.trade_offs.outcomes import (
    ATTACKERS,
    Attacked,
    Attacker,
    Outcome,
    Predicted,
    conclusive,
    lpips_net,
)
from leakwatch.studies.trade_offs.predictions import independent_pixels, with_prior

__all__ = ["ProbeAttack"]


@final
@dataclass(frozen=True, eq=False)
class ProbeAttack:
    """The same attack on the messages of the same samples, whatever shared them.

    Every sample is a message of its own: a client with one sample, the worst case.
    Asked several times at the same weights, its answers are averaged by all attackers;
    mixtures of it by those who know of them only after they are taken apart.

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
        prior: what attackers and predictions know of images, in the place of μ and R;
            ``None``: these.
        prepare: what becomes of ``x`` before the network gets it.
        queries: how often each sample's gradient is asked for, at the same weights.
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
    prior: GaussianPrior | None = None
    prepare: Prepare | None = None
    queries: int = 1

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
        check_classes(self.y, "a trade-off")
        check_index(self.index, len(self.x))
        device = next(net.parameters()).device
        x, y = self.x.to(device), self.y.to(device)
        self._gradients(net).check(x, y)
        self._start(x[:1])
        # Says so where the pixels of the originals are out of their range.
        self._quality(x, x)

    def check_partners(self, net: nn.Module, x: Tensor, y: Tensor) -> None:
        """Raises where samples can't be mixed with these, as :meth:`check`.

        Args:
            net: the network.
            x: network inputs.
            y: their labels.

        Raises:
            TypeError: as :meth:`leakwatch.GradientMap.check`.
            ValueError: the same; and for pixels out of range.
        """
        device = next(net.parameters()).device
        rows = torch.stack([y.argmin(), y.argmax()]) if y.ndim == 1 else slice(0, 2)
        self._gradients(net).check(x[rows].to(device), y[rows].to(device))
        self._quality(x, x)

    def run(
        self, net: nn.Module, defense: Defense | None, seed: int
    ) -> tuple[Attacked, ...]:
        """Shares the gradient of every sample, and attacks all messages.

        Args:
            net: the network.
            defense: ``None`` for none.
            seed: of its noise and of the attacks' starts.
        """
        gradients = self._gradients(net, torch.float64)
        device = next(net.parameters()).device
        samples = Samples(gradients, self.x.double().to(device), self.y.to(device))
        answers = share(defense, samples, seed, self.queries)
        predicted = self._predictions(answers, samples, seed)
        norms = answers.mean.clean.double().norm(dim=1).tolist()
        deltas = answers.delta_norm.tolist()
        return tuple(
            Attacked(
                self.index[row],
                int(self.y[row]),
                norms[row],
                deltas[row],
                dict(self._outcomes(answers, samples, defense, row, seed, predicted)),
            )
            for row in range(len(samples))
        )

    def _predictions(
        self, answers: Answers, samples: Samples, seed: int
    ) -> dict[Attacker, list[Predicted]]:
        if self.prior is None or answers.mixed:
            return independent_pixels(
                answers,
                samples,
                prior_std=self.prior_std / self.scale,
                peak=self.data_range / self.scale,
            )
        pixels = self._pixels()
        one = torch.ones_like(samples.x[0])
        return with_prior(
            answers,
            samples,
            pixels=pixels.to_pixels(samples.x).flatten(1),
            input_scale=(one / pixels.input_std(one)).flatten(),
            prior=self.prior,
            data_range=self.data_range,
            seed=seed,
        )

    def _gradients(
        self, net: nn.Module, dtype: torch.dtype = torch.float32
    ) -> GradientMap:
        return GradientMap(net, self.criterion, prepare=self.prepare, dtype=dtype)

    def _outcomes(
        self,
        answers: Answers,
        samples: Samples,
        defense: Defense | None,
        row: int,
        seed: int,
        predicted: dict[Attacker, list[Predicted]],
    ) -> Iterator[tuple[Attacker, Outcome]]:
        naive: tuple[Outcome, Tensor] | None = None
        x, y = samples.x[row : row + 1], samples.y[row : row + 1]
        parts: list[tuple[Tensor, Status]] = []
        guesses = defense is not None and defense.needs == "jacobian"

        def measured(who: Attacker) -> Outcome:
            nonlocal naive
            if who == "naive":
                made = self._reconstruct(plain(samples, answers, row), y, row, seed)
                naive = self._judged(made, x), made[0]
                return naive[0]
            if naive is not None and tells_all(answers):
                return naive[0]
            if answers.mixed:
                if not parts:
                    aims = mixtures(samples, answers, row)
                    parts.extend(self._reconstruct(aim, y, row, seed) for aim in aims)
                return self._unmixed(parts, answers, row, x, knows=who == "adaptive")
            if who == "adaptive" or defense is None or not guesses:
                aim = informed(samples, answers, row)
            elif naive is None:
                raise NotComputedError("the naive attack that it begins with failed.")
            else:
                aim = reimagined(defense, answers, samples, row, naive[1], seed)
            return self._judged(self._reconstruct(aim, y, row, seed), x)

        for who in self._in_order(guesses):
            try:
                outcome = measured(who)
            except NotComputedError as error:
                outcome = Outcome.without(Status("not computed", str(error)))
            except Exception as error:
                outcome = Outcome.without(Status("failed", describe_error(error)))
            if who in self.attackers:
                found = predicted[who][row] if who in predicted else Predicted(math.nan)
                yield (
                    who,
                    replace(outcome, predicted=found.psnr, at_least=found.at_least),
                )

    def _in_order(self, guesses: bool) -> tuple[Attacker, ...]:
        """Those who attack, and the naive one before who begins with its image."""
        needed: set[Attacker] = set(self.attackers)
        if guesses and "estimating" in needed:
            needed.add("naive")
        return tuple(who for who in ATTACKERS if who in needed)

    def _unmixed(
        self,
        reconstructions: Sequence[tuple[Tensor, Status]],
        answers: Answers,
        row: int,
        x: Tensor,
        *,
        knows: bool,
    ) -> Outcome:
        """By who knows the partners, or by who only knows what images are like."""
        mixings = answers.mixings(row)
        good = [i for i, (_, status) in enumerate(reconstructions) if status.usable]
        if not good:
            return Outcome.without(reconstructions[0][1])
        which, images = (
            [mixings[i] for i in good],
            [reconstructions[i][0] for i in good],
        )
        if knows:
            pairs = zip(which, images, strict=True)
            made = torch.cat([mixing.unmixed(image) for mixing, image in pairs])
            made = made.mean(0, keepdim=True)
        else:
            made = estimate(which, images, self._mean_image(x))
        status = OK
        if len(good) < len(reconstructions):
            status = Status(
                "estimated",
                f"from {len(good)} of {len(reconstructions)} reconstructions; the "
                f"attack did not match the other messages.",
            )
        return self._judged((self._pixels().clamp(made), status), x)

    def _judged(self, reconstruction: tuple[Tensor, Status], x: Tensor) -> Outcome:
        """How near the private image is what matched."""
        image, status = reconstruction
        if not status.usable:
            return Outcome.without(status)
        measured = self._quality(image, x)
        return Outcome(*measured, predicted=math.nan, status=status)

    def _reconstruct(
        self, aim: Aim, y: Tensor, row: int, seed: int
    ) -> tuple[Tensor, Status]:
        """An image, and whether it matches as well as what there is to be found."""
        observation, x = aim.observation, aim.truth
        shared = SharedGradient(
            observation.message,
            y[:, None],
            tuple(x.shape[1:]),
            noise_std=observation.noise_std,
            index=(self.index[row],),
        )
        reconstruction = self._engine(observation, tuple(x.shape[1:])).run(
            observation.gradients,
            shared,
            pixels=self._pixels(),
            start=self._start(x),
            seed=seed,
            restarts=self.restarts,
        )
        truth = observation.gradients(x, y) - observation.message
        left = float(truth.norm() / observation.message.norm().clamp_min(1e-300))
        status = reconstruction.status[0]
        if status.word != "failed":
            blank, _ = uninformed(
                observation.gradients, shared, y[:, None], self._pixels()
            )
            status = conclusive(
                float(reconstruction.relative[0]), left, float(blank[0])
            )
        return reconstruction.images, status

    def _mean_image(self, x: Tensor) -> Tensor:
        """The mean image, network input."""
        own: Tensor | None = getattr(self.engine, "prior_mean", None)
        mean = self.prior_mean if own is None else own
        if own is None and self.prior is not None:
            mean = self.prior.mean
        if mean is None:
            mean = torch.full(x.shape[1:], self.data_range / 2)
        return self._pixels().to_input(mean.to(x))

    def _start(self, x: Tensor) -> Start:
        near = self.start == "near"
        return Start.near(x, self.radius) if near else Start(self.start)

    def _engine(self, observation: Observation, shape: tuple[int, ...]) -> Attack:
        engine = self.engine
        if isinstance(engine, BaseAttack):
            engine = engine.fit_to(
                shape,
                prior_std=self.prior_std,
                prior_mean=self.prior_mean,
                prior=self.prior,
            )
        if observation.distance == "l2":
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
        name = f"lpips_{lpips_net()}"
        result = quality(
            images.cpu().double(),
            x.cpu(),
            pixels=self._pixels(),
            data_range=self.data_range,
            metrics=("psnr", name) if x.ndim == 4 else ("psnr",),
        )
        perceptual = name in result
        return float(result["psnr"][0]), float(
            result[name][0]
        ) if perceptual else math.nan

"""The attack that checks whether a noise holds what was predicted of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from leakwatch.attacks import GaussNewton
from leakwatch.attacks.api import attack
from leakwatch.priors import GaussianPrior
from leakwatch.quality import quality
from leakwatch.studies.noise.spectra import NoiseResponse

# By this factor the rest may exceed what the noise leaves at the true image.
_MATCHED: Final = 1.1
# From near the truth a few steps lead to the maximum of the posterior, and then noise
# is all that is left to match.
_STEPS: Final = 30
_PATIENCE: Final = 4


@final
@dataclass(frozen=True)
class Check:
    """One attack on one probe.

    Attributes:
        sample: data-set index.
        box: whether the attacker knew the range of pixels.
        psnr: achieved, dB.
        predicted: for this noise, dB; NaN where it is not known.
        mean_image: PSNR of the prior's mean image, which needs no gradient, dB.
        conclusive: whether the gradient was matched as far as the noise allows.
    """

    sample: int
    box: bool
    psnr: float
    predicted: float
    mean_image: float
    conclusive: bool

    def __str__(self) -> str:
        kind = "with" if self.box else "without"
        doubt = "" if self.conclusive else ", but did not match the gradient"
        return (
            f"sample {self.sample}: the attack {kind} the pixels' range reached "
            f"{self.psnr:.1f} dB{doubt}; predicted {self.predicted:.1f}, mean image "
            f"{self.mean_image:.1f}"
        )


@final
@dataclass(frozen=True, eq=False)
class CheckAttack:
    """Gauss-Newton at the maximum of the posterior, near the truth if there is noise.

    Attributes:
        module: the network.
        x: all probes.
        y: their labels.
        index: their data-set indices.
        prior_std: R, pixel units.
        prior_mean: μ, pixel units; ``None`` for mid-grey.
        prior: instead of both.
        size: d_θ.
        radius: of the start, network-input units.
        seed: of noise and start.
        time_limit: seconds of each attack.
        spectra: of all probes.
        sharing: keywords of :func:`leakwatch.attack`: pixels, criterion, prepare,
            parameters.
    """

    module: nn.Module
    x: Tensor
    y: Tensor
    index: tuple[int, ...]
    prior_std: float
    prior_mean: Tensor | None
    prior: GaussianPrior | None
    size: int
    radius: float
    seed: int
    time_limit: float | None
    spectra: tuple[NoiseResponse, ...]
    sharing: dict[str, Any]

    def run(self, places: Sequence[int], noise_std: float) -> tuple[Check, ...]:
        """Attacks some probes under one noise, without and with the pixels' range."""
        chosen = torch.tensor(places)
        x, y = self.x[chosen.to(self.x.device)], self.y[chosen.to(self.y.device)]
        blank = self.mean_image_psnr()
        out = []
        for box in (False, True):
            engine = GaussNewton(
                steps=_STEPS,
                patience=_PATIENCE,
                # The stage that helps random starts; here it would be all of the cost.
                logits=not noise_std,
                box=box,
                prior_std=None if self.prior else self.prior_std,
                prior_mean=None if self.prior else self.prior_mean,
                prior=self.prior,
            )
            reconstruction = attack(
                self.module,
                x,
                y,
                engine,
                # Without noise the prior has no weight, and directions that the
                # gradient does not show would stay where they start, near the truth.
                start="near" if noise_std else "uniform",
                radius=self.radius,
                noise_std=noise_std,
                restarts=1,
                seed=self.seed,
                time_limit=self.time_limit,
                **self.sharing,
            )
            reached = self._psnr(reconstruction.images, x, clip=box)
            for k, place in enumerate(places):
                length = self.spectra[place].grad_norm
                noise = noise_std * math.sqrt(self.size)
                left = noise / math.hypot(length, noise)
                predicted = (
                    self.spectra[place].psnr(noise_std).number
                    if noise_std
                    else math.nan
                )
                out.append(
                    Check(
                        sample=self.index[place],
                        box=box,
                        psnr=reached[k],
                        predicted=predicted,
                        mean_image=blank[place],
                        conclusive=float(reconstruction.relative[k])
                        <= _MATCHED * left + 1e-3,
                    )
                )
        return tuple(out)

    def mean_image_psnr(self) -> list[float]:
        """PSNR of the prior's mean image on every probe, dB."""
        return self._psnr(self._mean_image(self.x), self.x, clip=True)

    def _psnr(self, images: Tensor, x: Tensor, *, clip: bool) -> list[float]:
        measured = quality(
            images.cpu(),
            x.to(images.dtype).cpu(),
            mean=self.sharing["mean"],
            std=self.sharing["std"],
            data_range=self.sharing["data_range"],
            low=0.0 if clip else None,
            metrics=("psnr",),
        )
        numbers: list[float] = measured["psnr"].tolist()
        return numbers

    def _mean_image(self, x: Tensor) -> Tensor:
        """μ as network inputs, one for each of ``x``."""
        pixels = torch.full_like(x[0].double(), self.sharing["data_range"] / 2)
        mean = self.prior_mean if self.prior is None else self.prior.mean
        if mean is not None:
            pixels = mean.to(pixels)
        mean, std = self.sharing["mean"], self.sharing["std"]
        if mean is not None and std is not None:
            shape = (-1, *[1] * (x.ndim - 2))
            pixels = (pixels - pixels.new_tensor(mean).reshape(shape)) / (
                pixels.new_tensor(std).reshape(shape)
            )
        return pixels.expand(len(x), *pixels.shape).to(x.dtype)

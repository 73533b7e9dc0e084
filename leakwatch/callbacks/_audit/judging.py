"""How good reconstructions are, and what is known of an image without any attack."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, final

import numpy.typing as npt
import torch
from torch import Tensor

from leakwatch.attacks import PixelScale, Reconstruction, Start
from leakwatch.callbacks._recording.pictures import to_pictures
from leakwatch.probes import ProbeSet
from leakwatch.quality import QualityResult, best_constant, quality
from leakwatch.reporting.words import CLEARLY_ABOVE, HARDLY_BELOW
from leakwatch.scores import Settings
from leakwatch.status import OK, Status

__all__ = ["Judge"]

#: dB by which an attack must beat the best image of one colour to show anything.
_BEYOND_CONSTANT: Final = 3.0
#: dB; a near attack whose result is this close to its start has done nothing.
_STILL: Final = 0.1


@final
class Judge:
    """Judges reconstructions of probes on the scale of these probes.

    Args:
        probes: whose normalisation, range and mean image count.
        settings: for the data range.

    Attributes:
        pixels: normalisation and range of the images.
    """

    def __init__(self, probes: ProbeSet, settings: Settings) -> None:
        self.pixels = pixel_scale(probes, settings)
        self._probes = probes
        self._data_range = settings.data_range

    def baselines(self, x: Tensor) -> dict[str, list[float]]:
        """What an attack has to beat, and what is known of an image without any attack.

        Args:
            x: true samples, network inputs.

        Returns:
            Name of a quantity → its value for each sample.
        """
        mean = self.pixels.to_input(self._probes.prior_mean.to(x)).expand_as(x)
        pixels = self.pixels.to_pixels(x.double())
        unattacked = {
            "audit/baseline/constant_psnr": self._quality(best_constant(x), x)["psnr"],
            "audit/baseline/mean_psnr": self._quality(mean, x)["psnr"],
            "image_std": pixels.reshape(len(x), -1).std(1, correction=0),
        }
        if x.ndim == 4:
            across = pixels.diff(dim=-1).abs().flatten(1).mean(1)
            down = pixels.diff(dim=-2).abs().flatten(1).mean(1)
            unattacked["image_tv"] = (across + down).nan_to_num(0.0)
        return {name: values.tolist() for name, values in unattacked.items()}

    def start_psnr(
        self, x: Tensor, radius: float, seed: int, index: Sequence[int] | None
    ) -> list[float]:
        """How good the images are from which near attacks begin.

        Args:
            x: true samples, network inputs.
            radius: of the starts.
            seed: of the starts.
            index: what names each sample's stream.
        """
        drawn = Start.near(x, radius).draw(
            targets=len(x),
            images=1,
            shape=tuple(x.shape[1:]),
            seed=seed,
            pixels=self.pixels,
            index=index,
        )
        begun = self.pixels.clamp(drawn[0, :, 0]).to(x.dtype)
        values: list[float] = self._quality(begun, x)["psnr"].tolist()
        return values

    def judge(
        self,
        result: Reconstruction,
        x: Tensor,
        metrics: Sequence[str],
        begun: Sequence[float] | None = None,
    ) -> dict[str, tuple[list[float], list[Status]]]:
        """Quality, gradient error and verdict of each reconstruction, with statuses.

        A reconstruction that neither shows the sample nor matches its gradient says
        nothing about the sample: its values carry the attack's own status.

        Args:
            result: the reconstructions.
            x: true samples, network inputs.
            metrics: of the quality.
            begun: PSNR of the start of each attack; ``None`` for starts that know
                nothing.

        Returns:
            Last part of the quantity's name → values and statuses.
        """
        images = result.images.to("cpu", x.dtype)
        measured = self._quality(images, x, tuple(dict.fromkeys([*metrics, "psnr"])))
        verdicts = [
            _verdict(*facts)
            for facts in zip(
                measured["psnr"].tolist(),
                self._quality(best_constant(x), x)["psnr"].tolist(),
                [math.nan] * len(x) if begun is None else begun,
                result.status,
                strict=True,
            )
        ]
        columns: dict[str, tuple[list[float], list[Status]]] = {}
        for name in metrics:
            if name in measured.absent:
                gone = Status("not computed", measured.absent[name])
                columns[name] = ([math.nan] * len(x), [gone] * len(x))
                continue
            columns[name] = (
                measured[name].tolist(),
                [
                    own if not own.usable or verdict.usable else verdict
                    for own, (_, verdict) in zip(
                        measured.status[name], verdicts, strict=True
                    )
                ],
            )
        relative = result.relative.tolist()
        columns["match"] = (
            relative,
            [
                OK if math.isfinite(value) else status
                for value, status in zip(relative, result.status, strict=True)
            ],
        )
        columns["verdict"] = ([v for v, _ in verdicts], [s for _, s in verdicts])
        if len(result.restart_images) > 1:
            columns["best_psnr"] = self._best_try(result, x, verdicts)
        return columns

    def _best_try(
        self,
        result: Reconstruction,
        x: Tensor,
        verdicts: Sequence[tuple[float, Status]],
    ) -> tuple[list[float], list[Status]]:
        """PSNR of each sample's nearest try, which takes the truth to be found."""
        tries = result.restart_images.to("cpu", x.dtype).reshape(-1, *x.shape)
        every = torch.stack([self._quality(images, x)["psnr"] for images in tries])
        best = every.nan_to_num(-math.inf).amax(0)
        shown = self._quality(best_constant(x), x)["psnr"] + _BEYOND_CONSTANT
        statuses = [
            OK if clear and math.isfinite(value) else status
            for value, clear, (_, status) in zip(
                best.tolist(), (best > shown).tolist(), verdicts, strict=True
            )
        ]
        values = [v if math.isfinite(v) else math.nan for v in best.tolist()]
        return values, statuses

    def pictures(self, images: Tensor) -> npt.NDArray[Any] | None:
        """Network inputs as uint8 pictures; ``None`` for data that are none.

        Args:
            images: one per row.
        """
        return to_pictures(self.pixels.to_pixels(images), self._probes)

    def _quality(
        self, images: Tensor, x: Tensor, metrics: Sequence[str] = ("psnr",)
    ) -> QualityResult:
        return quality(
            images,
            x,
            pixels=self.pixels,
            data_range=self._data_range,
            low=self.pixels.low,
            metrics=metrics,
        )


def pixel_scale(probes: ProbeSet, settings: Settings) -> PixelScale:
    """Normalisation and range of the probes as attacks need them."""
    channel = -3 if probes.x.ndim == 4 else 1 - max(probes.x.ndim, 2)
    if probes.units == "input":
        return PixelScale(low=None, high=None, channel=channel)
    pixels = probes.pixels()
    top = settings.data_range
    inside = bool(pixels.amin() >= -1e-4 and pixels.amax() <= top * (1 + 1e-4))
    return PixelScale(
        probes.mean,
        probes.std,
        low=0.0 if inside else None,
        high=top if inside else None,
        channel=channel,
    )


def _verdict(
    psnr: float, constant: float, begun: float, status: Status
) -> tuple[float, Status]:
    """Recovered, partly, not, or the reason why that is not known.

    A picture counts if it shows more than one colour would, whatever the attack says
    of itself; not so for a near start, which shows the sample before the attack begins.
    """
    if status.word == "failed" or not math.isfinite(psnr):
        return math.nan, status if status.word != "ok" else Status("failed", "no image")
    near = math.isfinite(begun)
    if near and abs(psnr - begun) < _STILL:
        return math.nan, Status(
            "not converged", "the attack did not move from its start beside the sample"
        )
    shows = psnr >= max(constant + _BEYOND_CONSTANT, HARDLY_BELOW) and not near
    if status.word != "ok" and not shows:
        if status.usable:
            status = Status("not converged", status.reason)
        return math.nan, status
    if psnr >= CLEARLY_ABOVE:
        return 1.0, OK
    return (0.5 if psnr >= HARDLY_BELOW else 0.0), OK

"""How much noise is enough for a share of the probes, from their spectra alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import final

from leakwatch.reporting.words import count
from leakwatch.scores import Value
from leakwatch.scores.bayes import squared_error_at_target
from leakwatch.scores.measure.gaussian_channel import noise_for_squared_error
from leakwatch.status import OK, Status
from leakwatch.studies.noise.spectra import NoiseResponse


@final
@dataclass(frozen=True)
class Enough:
    """What spectra alone say.

    Attributes:
        noise_std: enough for the share; NaN if that is not known.
        status: why, then.
        needed: by each probe.
        order: places of the probes, most demanding first, unknown before all.
        held: places of those that the noise holds, most demanding first.
    """

    noise_std: float
    status: Status
    needed: tuple[Value, ...]
    order: tuple[int, ...]
    held: tuple[int, ...]


def enough(
    spectra: Sequence[NoiseResponse],
    target_psnr: float,
    share: float,
    hopeless: Mapping[int, Status] = MappingProxyType({}),
) -> Enough:
    """The smallest noise that holds a share of the probes, by prediction.

    Args:
        spectra: of the probes.
        target_psnr: dB.
        share: in (0, 1].
        hopeless: places of probes that no noise holds, and why.
    """
    needed = tuple(
        Value(math.nan, hopeless[i]) if i in hopeless else _needed(s, target_psnr)
        for i, s in enumerate(spectra)
    )
    rank = [v.number if v.status.usable else math.inf for v in needed]
    order = tuple(sorted(range(len(rank)), key=lambda i: -rank[i]))
    to_hold = math.ceil(share * len(rank) - 1e-9)
    noise = sorted(rank)[to_hold - 1]
    if math.isinf(noise):
        unknown = [v.status for v in needed if not v.status.usable]
        status = Status(
            unknown[0].word,
            f"for {len(unknown)} of {count(len(rank), 'probe')} no noise is known that "
            f"keeps them below the target, and {100 * share:g} % are to be kept there: "
            f"{unknown[0].reason}",
        )
        return Enough(math.nan, status, needed, order, ())
    held = tuple(i for i in order if rank[i] <= noise)
    rough = [needed[i].status for i in held if needed[i].status.word != "ok"]
    return Enough(noise, rough[0] if rough else OK, needed, order, held)


def _needed(spectrum: NoiseResponse, target_psnr: float) -> Value:
    value, channel = spectrum.noise_for(target_psnr), spectrum.channel
    if not value.status.usable or channel is None:
        return value
    # The most that rounding allows: a noise that is too small protects nobody.
    settings = replace(spectrum.settings, target_psnr=target_psnr)
    wanted = squared_error_at_target(len(channel.gain), settings)
    most, plain = (
        noise_for_squared_error(channel, gain, wanted)
        for gain in (channel.most, channel.gain)
    )
    # Rounding moves what knowledge of the range asks for by no more than that.
    needed = value.number + max(most - plain, 0.0)
    # With the statistics of images the channel speaks of the average image alone.
    return Value(needed if settings.prior else max(most, needed), value.status)

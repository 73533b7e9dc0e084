"""One audit step: scores of the probes, attacks on them, and how good these were."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from leakwatch.attacks import (
    Attack,
    FirstOrder,
    PixelScale,
    Reconstruction,
    SharedGradient,
    Start,
)
from leakwatch.attacks.combined import Combined
from leakwatch.attacks.gauss_newton import GaussNewton
from leakwatch.attacks.progress import ProgressLine
from leakwatch.attacks.starts import StartKind, stream
from leakwatch.callbacks.observing import observing
from leakwatch.callbacks.pictures import to_pictures
from leakwatch.callbacks.probing import Share, device_of
from leakwatch.gradients import GradientMap
from leakwatch.isolation import isolated_rng
from leakwatch.probes import ProbeSet
from leakwatch.quality import METRICS, best_constant, quality
from leakwatch.reporting import Row
from leakwatch.reporting.words import CLEARLY_ABOVE, HARDLY_BELOW
from leakwatch.scores import Settings
from leakwatch.status import OK, Status, describe_error

__all__ = ["Audit", "Kind", "attack_probes", "chosen", "quantities"]

Kind: TypeAlias = Literal["near", "random"]

#: Where an attack of each kind starts, for readers.
STARTS: Final[dict[Kind, str]] = {
    "near": "worst case: the attack starts beside the true sample",
    "random": "practical: the attack starts at noise",
}

#: dB by which an attack must beat the best image of one colour to show anything.
_BEYOND_CONSTANT: Final = 3.0
#: dB; a near attack whose result is this close to its start has done nothing.
_STILL: Final = 0.1


@final
@dataclass(frozen=True)
class Audit:
    """How probes are attacked.

    Attributes:
        attacks: kind of start → attack.
        samples: how many probes to attack, evenly by class; ``None`` for all.
        start: where attacks of the kind "random" begin: "normal", "uniform", "zeros".
        restarts: tries from random starts; a near start gets one.
        radius: of near starts, network-input units.
        noise_std: Gaussian noise that the attacked gradients carry.
        perturb: a defense, ``(targets, d_θ)`` → what is shared; before the noise.
        metrics: of the quality.
        time_limit: seconds for each kind of attack; ``None`` for no limit.
        seed: of noise and starts.
        progress: whether to show on stderr how far an attack has come.
    """

    attacks: dict[Kind, Attack]
    samples: int | None
    start: StartKind
    restarts: int
    radius: float
    noise_std: float
    perturb: Callable[[Tensor], Tensor] | None
    metrics: tuple[str, ...]
    time_limit: float | None
    seed: int
    progress: bool = False


def quantities(audit: Audit) -> dict[str, dict[str, str]]:
    """What is recorded for each attacked sample: unit, direction, meaning, source."""
    names = {kind: attack.name for kind, attack in audit.attacks.items()}
    return described(names, audit.metrics)


def described(
    attacks: Mapping[Kind, str],
    metrics: Sequence[str],
    match: str = "‖g(x) − g*‖/‖g*‖ at the reconstruction: how far it came",
) -> dict[str, dict[str, str]]:
    """Unit, direction, meaning and source of what is recorded of attacked samples.

    Args:
        attacks: kind of start → name of the attack.
        metrics: of the quality.
        match: what the measure of matching means.
    """
    found: dict[str, dict[str, str]] = {}

    def add(name: str, unit: str, direction: str, meaning: str, source: str) -> None:
        found[name] = {
            "unit": unit,
            "direction": direction,
            "meaning": meaning,
            "source": source,
        }

    for kind, attack in attacks.items():
        where = f"{attack}, {STARTS[kind]}"
        for name in metrics:
            metric = METRICS[name]
            better = "more" if metric.higher_is_better else "less"
            add(
                f"audit/{kind}/{name}",
                metric.unit,
                f"higher = {better} exposed",
                f"{metric.meaning} ({where})",
                metric.source,
            )
        add(
            f"audit/{kind}/match",
            "",
            "",
            f"{match} ({where})",
            "",
        )
        add(
            f"audit/{kind}/verdict",
            "",
            "higher = more exposed",
            f"1 recovered (PSNR of {CLEARLY_ABOVE:g} dB or more), 0.5 partly "
            f"({HARDLY_BELOW:g} dB or more), 0 not although the gradient was matched; "
            f"no number where the attack was inconclusive ({where})",
            "",
        )
    add(
        "audit/baseline/constant_psnr",
        "dB",
        "",
        "PSNR of the best image of one colour: what an attack must beat",
        "",
    )
    add(
        "audit/baseline/mean_psnr",
        "dB",
        "",
        "PSNR of the mean image of the data: a guess without any gradient",
        "",
    )
    add("image_std", "pixel", "", "Standard deviation over the image's pixels", "")
    add("image_tv", "pixel", "", "Mean absolute difference of neighbouring pixels", "")
    return found


def chosen(probes: ProbeSet, samples: int | None) -> list[int]:
    """Positions of the probes to attack, evenly by class, in the order of the probes.

    Args:
        probes: all probes.
        samples: how many; ``None`` for all.

    Example:
        >>> import torch
        >>> probes = ProbeSet.from_tensors(torch.rand(5, 2), [0, 0, 0, 1, 1])
        >>> chosen(probes, 3)
        [0, 1, 3]
    """
    if samples is None or samples >= len(probes):
        return list(range(len(probes)))
    seen: dict[int, int] = {}
    turns = []
    for i, label in enumerate(probes.y.tolist()):
        turns.append((seen.get(label, 0), i))
        seen[label] = seen.get(label, 0) + 1
    return sorted(i for _, i in sorted(turns)[:samples])


def attack_probes(
    module: nn.Module,
    gradients: GradientMap,
    probes: ProbeSet,
    settings: Settings,
    audit: Audit,
    share: Share,
    *,
    epoch: int,
    step: int,
    rank: int,
    world_size: int,
) -> None:
    """Attacks this process's part of the chosen probes and adds rows to its share.

    Args:
        module: the network, left as it was.
        gradients: its gradient map.
        probes: all probes.
        settings: data range and prior of the scores.
        audit: how to attack.
        share: gets rows and pictures; an exception becomes a status.
        epoch: completed epochs.
        step: optimiser steps.
        rank: of this process.
        world_size: number of processes.
    """
    started = time.perf_counter()
    picked = [i for i in chosen(probes, audit.samples) if i % world_size == rank]
    if not picked:
        return
    try:
        _attack_probes(
            module, gradients, probes, settings, audit, share, picked, (epoch, step)
        )
    except Exception as error:
        share.error = share.error or describe_error(error)
    share.seconds += time.perf_counter() - started


def _attack_probes(
    module: nn.Module,
    gradients: GradientMap,
    probes: ProbeSet,
    settings: Settings,
    audit: Audit,
    share: Share,
    picked: Sequence[int],
    moment: tuple[int, int],
) -> None:
    x, y = probes.x[picked], probes.y[picked]
    members = [(probes.index[i], int(probes.y[i])) for i in picked]
    pixels = pixel_scale(probes, settings)

    def rows(
        name: str,
        values: Sequence[float],
        statuses: Sequence[Status],
        which: Sequence[int] = range(len(members)),
    ) -> None:
        share.rows += [
            Row(*moment, *members[i], name, float(value), str(status))
            for i, value, status in zip(which, values, statuses, strict=True)
        ]

    constant: list[float] = []
    for name, known in baselines(x, probes, pixels, settings):
        rows(name, known.tolist(), [OK] * len(members))
        constant = known.tolist() if name.endswith("constant_psnr") else constant
    pictures = {"original": to_pictures(pixels.to_pixels(x), probes)}
    kinds = with_prior(audit, probes, settings)
    place = device_of(module)
    failed = dict.fromkeys(range(len(members)), "")
    shared: SharedGradient | None = None
    try:
        with observing(module):
            shared, good = share_gradients(
                gradients, x.to(place), y.to(place), [s for s, _ in members], audit
            )
    except Exception as error:
        good, share.error = [], describe_error(error)
        failed = dict.fromkeys(failed, share.error)
    for i in failed.keys() - set(good):
        failed[i] = failed[i] or "the gradient of this sample is not finite"
    for kind in audit.attacks:
        names = [*audit.metrics, "match", "verdict"]
        why = dict(failed)
        try:
            if shared is not None and good:
                with observing(module):
                    found = run_attack(
                        gradients, shared, x[good].to(place), kind, kinds, pixels
                    )
                begun = [math.nan] * len(good)
                if kind == "near":
                    begun = _psnr_of_starts(x[good], shared, audit, pixels, settings)
                columns = judge(
                    found,
                    x[good],
                    audit.metrics,
                    pixels,
                    settings,
                    [constant[i] for i in good],
                    begun,
                )
                for name, (values, statuses) in columns.items():
                    rows(f"audit/{kind}/{name}", values, statuses, good)
                images = x.clone().fill_(math.nan)
                images[good] = found.images.to("cpu", x.dtype)
                pictures[kind] = to_pictures(pixels.to_pixels(images), probes)
                why = {i: text for i, text in failed.items() if i not in set(good)}
        except Exception as error:
            share.error = share.error or describe_error(error)
            why = dict.fromkeys(failed, describe_error(error))
        for name in names if why else ():
            rows(
                f"audit/{kind}/{name}",
                [math.nan] * len(why),
                [Status("failed", text) for text in why.values()],
                list(why),
            )
    shown = {name: value for name, value in pictures.items() if value is not None}
    if shown:
        share.pictures |= shown
        share.attacked = [sample for sample, _ in members]
        share.attacked_labels = [label for _, label in members]


def with_prior(audit: Audit, probes: ProbeSet, settings: Settings) -> Audit:
    """The audit with attacks that fit these samples.

    Attacks with a Gaussian prior get the mean and variance that the Bayesian scores
    assume, so that both speak of one attacker; total variation is left out where
    samples are no images.
    """
    attacks: dict[Kind, Attack] = {}
    for kind, attack in audit.attacks.items():
        if isinstance(attack, FirstOrder | Combined) and probes.x.ndim < 4:
            attack = attack.changed(tv=0.0)
        if isinstance(attack, GaussNewton) and attack.prior_std is None:
            attack = replace(
                attack, prior_std=settings.prior_std, prior_mean=probes.prior_mean
            )
        attacks[kind] = attack
    return replace(audit, attacks=attacks)


def share_gradients(
    gradients: GradientMap,
    x: Tensor,
    y: Tensor,
    index: Sequence[int],
    audit: Audit,
) -> tuple[SharedGradient | None, list[int]]:
    """What these samples would share, defense and noise included.

    A sample's defense and noise draw from a stream that its index names: what else is
    audited, in which process and after which training, changes nothing.

    Args:
        gradients: the gradient map.
        x: network inputs.
        y: labels.
        index: data-set index of each sample.
        audit: for the defense and the noise.

    Returns:
        The gradients of the samples where they are finite, and which these are.

    Raises:
        ValueError: if the defense changes the shape.
    """
    clean = gradients(x, y)
    kept, good = [], []
    for i, sample in enumerate(index):
        g = clean[i : i + 1]
        if audit.perturb is not None:
            with isolated_rng():
                torch.manual_seed(stream(audit.seed, sample, 1).initial_seed() % 2**63)
                g = defended(audit.perturb, g)
        noise = torch.randn(
            g.shape, dtype=torch.float64, generator=stream(audit.seed, sample)
        )
        g = g + (audit.noise_std * noise).to(g)
        if bool(torch.isfinite(g).all()):
            kept.append(g)
            good.append(i)
    if not good:
        return None, good
    return (
        SharedGradient(
            torch.cat(kept),
            y[good, None],
            tuple(x.shape[1:]),
            noise_std=audit.noise_std,
            index=tuple(index[i] for i in good),
        ),
        good,
    )


def defended(perturb: Callable[[Tensor], Tensor], g: Tensor) -> Tensor:
    """What a defense makes of gradients ``(n, d_θ)``.

    Raises:
        TypeError: if it doesn't return a tensor.
        ValueError: if it changes the shape.
    """
    out: object = perturb(g.clone())
    if not isinstance(out, Tensor):
        raise TypeError(
            f"perturb must return the gradients that are shared, a tensor of shape "
            f"(n, d_θ), but returned {type(out).__name__}."
        )
    if out.shape != g.shape:
        raise ValueError(
            f"perturb must keep the shape {tuple(g.shape)} of the gradients, but "
            f"returned {tuple(out.shape)}."
        )
    return out.detach().to(g)


def run_attack(
    gradients: GradientMap,
    shared: SharedGradient,
    x: Tensor,
    kind: Kind,
    audit: Audit,
    pixels: PixelScale,
) -> Reconstruction:
    """Attacks shared gradients.

    Args:
        gradients: the gradient map.
        shared: from :func:`share_gradients`.
        x: the samples that they came from, for near starts only.
        kind: of start.
        audit: how to attack.
        pixels: of the images.
    """
    near = kind == "near"
    attack = audit.attacks[kind]
    line = ProgressLine(f"{attack.name}, {kind} start") if audit.progress else None
    try:
        return attack.run(
            gradients,
            shared,
            pixels=pixels,
            start=Start.near(x, audit.radius) if near else Start(audit.start),
            seed=audit.seed,
            restarts=1 if near else audit.restarts,
            time_limit=audit.time_limit,
            progress=line,
        )
    finally:
        if line is not None:
            line.end()


def _psnr_of_starts(
    x: Tensor,
    shared: SharedGradient,
    audit: Audit,
    pixels: PixelScale,
    settings: Settings,
) -> list[float]:
    """How good the images are from which near attacks begin."""
    drawn = Start.near(x, audit.radius).draw(
        targets=len(x),
        images=1,
        shape=tuple(x.shape[1:]),
        seed=audit.seed,
        pixels=pixels,
        index=shared.index,
    )
    found = quality(
        pixels.clamp(drawn[0, :, 0]).to(x.dtype),
        x,
        pixels=pixels,
        data_range=settings.data_range,
        low=pixels.low,
        metrics=("psnr",),
    )
    values: list[float] = found["psnr"].tolist()
    return values


def judge(
    found: Reconstruction,
    x: Tensor,
    metrics: Sequence[str],
    pixels: PixelScale,
    settings: Settings,
    constant: Sequence[float],
    begun: Sequence[float],
) -> dict[str, tuple[list[float], list[Status]]]:
    """Quality, gradient error and verdict of each reconstruction, with statuses.

    A reconstruction that neither shows the sample nor matches its gradient says
    nothing about the sample: its values carry the attack's own status.

    Args:
        found: the reconstructions.
        x: true samples, network inputs.
        metrics: of the quality.
        pixels: of the images.
        settings: for the data range.
        constant: PSNR of the best constant image of each sample.
        begun: PSNR of the start of each attack, NaN for starts that know nothing.

    Returns:
        Last part of the quantity's name → values and statuses.
    """
    wanted = tuple(dict.fromkeys([*metrics, "psnr"]))
    result = quality(
        found.images.to("cpu", x.dtype),
        x,
        pixels=pixels,
        data_range=settings.data_range,
        low=pixels.low,
        metrics=wanted,
    )
    psnr = result["psnr"].tolist()
    verdicts = [
        _verdict(*known)
        for known in zip(psnr, constant, begun, found.status, strict=True)
    ]
    columns: dict[str, tuple[list[float], list[Status]]] = {}
    for name in metrics:
        if name in result.absent:
            gone = Status("not computed", result.absent[name])
            columns[name] = ([math.nan] * len(x), [gone] * len(x))
            continue
        columns[name] = (
            result[name].tolist(),
            [
                own if not own.usable or verdict.usable else verdict
                for own, (_, verdict) in zip(result.status[name], verdicts, strict=True)
            ],
        )
    columns["match"] = (
        found.relative.tolist(),
        [
            OK if math.isfinite(v) else s
            for v, s in zip(found.relative.tolist(), found.status, strict=True)
        ],
    )
    columns["verdict"] = ([v for v, _ in verdicts], [s for _, s in verdicts])
    return columns


def pixel_scale(probes: ProbeSet, settings: Settings) -> PixelScale:
    """Normalisation and range of the probes as attacks need them."""
    channel = -3 if probes.x.ndim == 4 else 1 - max(probes.x.ndim, 2)
    if probes.units == "input":
        return PixelScale(low=None, high=None, channel=channel)
    seen = probes.pixels()
    top = settings.data_range
    inside = bool(seen.amin() >= -1e-4 and seen.amax() <= top * (1 + 1e-4))
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


def baselines(
    x: Tensor, probes: ProbeSet, pixels: PixelScale, settings: Settings
) -> Iterator[tuple[str, Tensor]]:
    """What an attack has to beat, and what is known of an image without any attack.

    Args:
        x: true samples, network inputs.
        probes: for the mean image.
        pixels: of the images.
        settings: for the data range.

    Yields:
        The name of a quantity and its value for each sample.
    """
    common: dict[str, Any] = {
        "pixels": pixels,
        "data_range": settings.data_range,
        "low": pixels.low,
        "metrics": ("psnr",),
    }
    constant = quality(best_constant(x), x, **common)
    yield "audit/baseline/constant_psnr", constant["psnr"]
    mean = pixels.to_input(probes.prior_mean.to(x)).expand_as(x)
    yield "audit/baseline/mean_psnr", quality(mean, x, **common)["psnr"]
    seen = pixels.to_pixels(x.double())
    yield "image_std", seen.reshape(len(x), -1).std(1, correction=0)
    if x.ndim == 4:
        across = seen.diff(dim=-1).abs().flatten(1).mean(1)
        down = seen.diff(dim=-2).abs().flatten(1).mean(1)
        yield "image_tv", (across + down).nan_to_num(0.0)

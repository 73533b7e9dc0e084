"""Which probes an audit attacks, by what, and what the attacks may assume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, final

from torch import Tensor

from leakwatch.attacks import Attack, FirstOrder, PixelScale
from leakwatch.attacks.combined import Combined
from leakwatch.attacks.gauss_newton.attack import GaussNewton
from leakwatch.attacks.start import StartKind
from leakwatch.probes import ProbeSet
from leakwatch.scores import Settings

__all__ = ["Audit", "Kind", "chosen", "pixel_scale", "with_prior"]

Kind: TypeAlias = Literal["near", "random"]


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

"""How audits of gradients and of updates attack, and what the attacks may assume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol, TypeAlias, final, runtime_checkable

from torch import Tensor

from leakwatch.attacks import Attack
from leakwatch.attacks.base import BaseAttack
from leakwatch.attacks.registry import PublishedAttack
from leakwatch.attacks.start import StartKind
from leakwatch.attacks.updates.base import UpdateAttack
from leakwatch.checks import check_integer
from leakwatch.federated import Round
from leakwatch.probes import ProbeSet
from leakwatch.scores import Score, Settings
from leakwatch.scores.updates.client import JOINT, Effort

__all__ = [
    "METRICS",
    "Audit",
    "Federated",
    "Kind",
    "UpdatePlan",
    "chosen",
    "chosen_attack",
    "with_prior",
]

Kind: TypeAlias = Literal["near", "random"]

#: Quality that is measured unless said otherwise.
METRICS: Final = ("mse", "psnr", "ssim")


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
        time_limit: seconds for the attacks of one audit; ``None`` for no limit.
        seed: of noise and starts.
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
    counts: dict[int | None, int] = {}
    turns = []
    for i, label in enumerate(probes.labels):
        turns.append((counts.get(label, 0), i))
        counts[label] = counts.get(label, 0) + 1
    return sorted(i for _, i in sorted(turns)[:samples])


def with_prior(audit: Audit, probes: ProbeSet, settings: Settings) -> Audit:
    """The audit with attacks that fit these samples.

    Attacks with a Gaussian prior get the mean and variance that the Bayesian scores
    assume, so that both speak of one attacker; total variation is left out where
    samples are no images.
    """
    attacks: dict[Kind, Attack] = {}
    for kind, attack in audit.attacks.items():
        if isinstance(attack, BaseAttack):
            attack = attack.fit_to(
                tuple(probes.x.shape[1:]),
                prior_std=settings.prior_std,
                prior_mean=probes.prior_mean,
                prior=settings.prior,
            )
        attacks[kind] = attack
    return replace(audit, attacks=attacks)


@runtime_checkable
class Federated(Protocol):
    """What a module must keep for its rounds to be audited."""

    last_round: Round | None
    """The round just completed, with what each client sent and held."""


@final
@dataclass(frozen=True)
class UpdatePlan:
    """How clients are attacked and scored.

    Attributes:
        attack: on their updates; ``None`` for scores alone.
        start: where it begins.
        restarts: tries.
        labels: whether the server knows how many samples of each class a client has.
        training: whether the server knows the local training.
        scores: to compare with.
        metrics: of the quality.
        effort: what scoring may cost.
        time_limit: seconds for the attacks of one audit; ``None`` for no limit.
        seed: of the starts.
    """

    attack: UpdateAttack | None
    start: StartKind
    restarts: int
    labels: bool
    training: bool
    scores: tuple[Score, ...]
    metrics: tuple[str, ...]
    effort: Effort
    time_limit: float | None
    seed: int

    @property
    def score_names(self) -> list[str]:
        """Scores of each sample."""
        names = [s.name for s in self.scores] if self.effort.blocks else []
        return [*names, *(JOINT if self.effort.joint else ())]


def chosen_attack(
    argument: str,
    value: Any,
    steps: int | None,
    get: Callable[[str], PublishedAttack[Any]],
    *,
    example: str,
    optional: bool = False,
) -> PublishedAttack[Any]:
    """The attack that an argument names or is, and how it begins.

    Args:
        argument: its name.
        value: a preset's name, or an attack object.
        steps: instead of the preset's; ``None`` leaves them.
        get: presets by name.
        example: one of them, for error texts.
        optional: whether the argument may be ``None``, for error texts.

    Raises:
        TypeError: for anything else.
        ValueError: for a name that is unknown, steps below 1, or steps for an object.
    """
    if steps is not None:
        steps = check_integer("steps", steps, example=300)
    if isinstance(value, str):
        preset = get(value)
        if steps is None:
            return preset
        return replace(preset, attack=preset.attack.changed(steps=steps))
    runs = callable(getattr(value, "run", None)) and hasattr(value, "name")
    if isinstance(value, type) or not runs:
        kinds = ", an attack object or None" if optional else " or an attack object"
        raise TypeError(
            f"{argument} must be the name of a preset{kinds}, got "
            f"{type(value).__name__}; for instance {argument}={example!r}."
        )
    if steps is not None:
        raise ValueError(
            f"steps={steps} is for presets; {argument} is an object with its own."
        )
    return PublishedAttack(value)

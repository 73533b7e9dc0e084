"""What attackers made of the message of one sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, final

from leakwatch.status import OK, Status

__all__ = ["ATTACKERS", "Attacked", "Attacker", "Outcome"]

Attacker: TypeAlias = Literal["naive", "estimating", "adaptive"]
"""Who attacks. ``naive``: takes noise for isotropic and matches the message as it is.
``adaptive``: knows the covariance of the noise, or which entries were pruned, at the
private sample itself: an oracle for defenses whose noise depends on it. ``estimating``:
knows the defense, and what it would have done at its own reconstruction."""

ATTACKERS: Final[tuple[Attacker, ...]] = ("naive", "estimating", "adaptive")


@final
@dataclass(frozen=True)
class Outcome:
    """What one attacker made of one message.

    Attributes:
        psnr: achieved, dB; NaN where the status is not usable.
        lpips: perceptual distance, higher = less exposed; NaN where it is not known.
        predicted: PSNR that linearisation predicts for this attacker, dB.
        status: ``ok`` where the message was matched as well as the true image does.
    """

    psnr: float
    lpips: float
    predicted: float
    status: Status = OK

    @classmethod
    def without(cls, status: Status, predicted: float = math.nan) -> Outcome:
        """None, and why."""
        return cls(math.nan, math.nan, predicted, status)


@final
@dataclass(frozen=True, eq=False)
class Attacked:
    """One sample's message and what attackers made of it.

    Attributes:
        sample: data-set index.
        label: class.
        gradient_norm: ‖g‖.
        delta_norm: ‖δ‖ that was really added.
        outcomes: by attacker.
    """

    sample: int
    label: int
    gradient_norm: float
    delta_norm: float
    outcomes: dict[Attacker, Outcome]

    @property
    def relative(self) -> float:
        """‖δ‖/‖g‖; NaN where g = 0."""
        if self.gradient_norm == 0:
            return math.nan
        return self.delta_norm / self.gradient_norm

"""What attackers made of the message of one sample."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias, final

from leakwatch.quality.perceptual import LpipsNet, weights_file
from leakwatch.status import OK, Status

__all__ = [
    "ATTACKERS",
    "EXACT",
    "Attacked",
    "Attacker",
    "Outcome",
    "Predicted",
    "conclusive",
    "lpips_net",
]

Attacker: TypeAlias = Literal["naive", "estimating", "adaptive"]
"""Who attacks. ``naive``: takes noise for isotropic and matches the message as it is.
``adaptive``: knows the covariance of the noise, or which entries were pruned, at the
private sample itself, or whom it was mixed with: an oracle for defenses that depend on
what a server does not have. ``estimating``: knows the defense, and what it would have
done at its own reconstruction; of mixtures α and both labels, and estimates the sample
from what images are like, see :func:`leakwatch.defenses.mixing.estimate`."""

# By this factor the rest may exceed what the true image leaves: an attack that did not
# even come so far says nothing about the sample.
_MATCHED: Final = 1.1

_LPIPS: Final[tuple[LpipsNet, ...]] = ("alex", "vgg", "squeeze")

#: PSNR, dB, from which on a prediction says no more than that nothing is missed.
EXACT: Final = 100.0

ATTACKERS: Final[tuple[Attacker, ...]] = ("naive", "estimating", "adaptive")


class Predicted(NamedTuple):
    """What an attacker is predicted to achieve.

    Attributes:
        psnr: dB; NaN where there is no prediction.
        at_least: whether it may be more.
    """

    psnr: float
    at_least: bool = False


@final
@dataclass(frozen=True)
class Outcome:
    """What one attacker made of one message.

    Attributes:
        psnr: achieved, dB; NaN where the status is not usable.
        lpips: perceptual distance, higher = less exposed; NaN where it is not known.
        predicted: PSNR that linearisation predicts for this attacker, dB.
        status: ``ok`` where the message was matched as well as the true image does.
        at_least: whether it may be more than predicted.
    """

    psnr: float
    lpips: float
    predicted: float
    status: Status = OK
    at_least: bool = False

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
        delta_norm: ‖δ‖ that was really added, root mean square over queries.
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


def conclusive(rest: float, left: float, blank: float) -> Status:
    """Whether an attack matched its message as well as the truth does.

    Under much noise, or of a mixture, the truth itself leaves most of the message
    unmatched, and so does any image; there an attack has to come at least half of the
    way from what images leave that know nothing.

    Args:
        rest: ‖L g(x̂) − L g̃‖ over ‖L g̃‖.
        left: the same at the private image.
        blank: the same of uniform noise or plain grey, whichever is less.

    Example:
        >>> conclusive(0.70, 0.69, blank=0.72).word, conclusive(0.71, 0.69, 0.72).word
        ('ok', 'not converged')
    """
    if rest <= _MATCHED * left + 1e-3 and rest <= (left + blank) / 2:
        return OK
    return Status(
        "not converged",
        f"the attack left {rest:.2g} of the message unmatched, where the private image "
        f"leaves {left:.2g} and noise or plain grey {blank:.2g}; it needs more steps "
        f"or restarts. That it failed does not say that the sample is safe.",
    )


def lpips_net() -> LpipsNet:
    """The first network whose weights are here; the smallest if none are."""
    here = [net for net in _LPIPS if weights_file(net).is_file()]
    return here[0] if here else _LPIPS[-1]

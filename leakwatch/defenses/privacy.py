"""ε of differential privacy, by the accountants of Opacus, beside what attacks find."""

from __future__ import annotations

import importlib
import math
import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, final, get_args

from leakwatch.checks import check_choice, check_integer, check_number
from leakwatch.defenses.base import Defense
from leakwatch.defenses.dpsgd import DPSGD
from leakwatch.defenses.gaussian import GaussianNoise
from leakwatch.status import OK, Status

__all__ = ["Accountant", "PrivacyLoss", "Sampling", "privacy_loss"]

Accountant: TypeAlias = Literal["prv", "rdp"]
"""How privacy losses are added up: numerically, tight to 0.01 (Gopi, Lee & Wutschitz,
NeurIPS 2021), or by Rényi divergences (Mironov, CSF 2017), faster and looser."""

Sampling: TypeAlias = Literal["poisson", "epochs"]
"""Which steps a sample takes part in. ``poisson``: each with the probability
``sample_rate``, independently; the attacker doesn't know which, and ε shrinks.
``epochs``: exactly one in every 1/``sample_rate`` steps, known to the attacker."""

# The numerical accountant takes memory in proportion to ε.
_LARGE: Final = 50.0


@final
@dataclass(frozen=True)
class PrivacyLoss:
    """ε of all steps together.

    Attributes:
        epsilon: smaller = more private; NaN where none can be stated.
        delta: δ, at which it holds.
        accountant: that added up.
        status: ``ok``; ``undefined`` where no ε follows from the defense; ``not
            computed`` without Opacus. Neither says that anything is private.
    """

    epsilon: float
    delta: float
    accountant: Accountant
    status: Status = OK


def privacy_loss(
    defense: Defense,
    *,
    steps: int,
    sample_rate: float,
    delta: float,
    accountant: Accountant = "prv",
    sampling: Sampling = "poisson",
    sensitivity: float | None = None,
) -> PrivacyLoss:
    """ε that training under a defense has cost so far.

    Of one sample against an attacker who sees every message and knows all other
    samples. Neighbours differ by one sample that is there or not, as in Abadi et al.
    (CCS 2016).

    Args:
        defense: :class:`DPSGD`, or :class:`GaussianNoise` of a stated standard
            deviation.
        steps: messages so far.
        sample_rate: share of the samples that is in a step, in (0, 1].
        delta: δ, in (0, 1): well below one over the number of samples.
        accountant: ``"prv"`` or ``"rdp"``; above ε = 50 always the latter.
        sampling: ``"poisson"``, as Opacus' own loaders draw, or ``"epochs"``, which
            also holds for batches that are shuffled once an epoch.
        sensitivity: by how much one sample can change a message, gradient units, for
            :class:`GaussianNoise`; :class:`DPSGD` states its own. With every message
            clipped to norm C it is 2C.

    Returns:
        ε, or why there is none.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range.

    Example:
        >>> from leakwatch.defenses import DPSGD, GaussianNoise, Budget
        >>> spent = privacy_loss(
        ...     GaussianNoise(Budget(0.1)), steps=9, sample_rate=1.0, delta=1e-5)
        >>> spent.status.word, spent.epsilon
        ('undefined', nan)
    """
    steps = check_integer("steps", steps)
    rate = check_number("sample_rate", sample_rate, "(0, 1]", example=0.01)
    delta = check_number("delta", delta, "(0, 1)", example=1e-5)
    check_choice("accountant", accountant, get_args(Accountant))
    check_choice("sampling", sampling, get_args(Sampling))
    if sensitivity is not None:
        sensitivity = check_number("sensitivity", sensitivity, example=1.0)

    def without(word: str, why: str) -> PrivacyLoss:
        return PrivacyLoss(math.nan, delta, accountant, Status(word, why))

    noise, why = _noise_multiplier(defense, sensitivity)
    if why:
        return without("undefined", why)
    try:
        accountants = importlib.import_module("opacus.accountants")
    except ModuleNotFoundError:
        return without(
            "not computed",
            "ε needs Opacus, which is not installed; install it with pip install "
            "'lightning-leakwatch[dp]'",
        )
    if sampling == "epochs":
        steps, rate = max(1, math.ceil(steps * rate - 1e-9)), 1.0
    history = [(noise, rate, steps)]
    epsilon = _epsilon(accountants, "rdp", history, delta)
    if accountant == "prv" and epsilon <= _LARGE:
        epsilon = _epsilon(accountants, "prv", history, delta)
    if not math.isfinite(epsilon):
        return without("undefined", "the noise is so small that ε is not finite")
    used: Accountant = accountant if epsilon <= _LARGE else "rdp"
    return PrivacyLoss(epsilon, delta, used)


def _noise_multiplier(defense: Defense, sensitivity: float | None) -> tuple[float, str]:
    """Noise over sensitivity; or why there is none."""
    if isinstance(defense, DPSGD):
        if not defense.noise_multiplier:
            return math.nan, "noise_multiplier is 0, so ε is infinite"
        return defense.noise_multiplier, ""
    if not isinstance(defense, GaussianNoise):
        return math.nan, (
            f"ε is known of dp-sgd and of gaussian noise, not of {defense.name}"
        )
    if defense.budget.unit != "std":
        return math.nan, (
            f"noise of a size in the unit {defense.budget.unit!r} follows the gradient "
            f"and gives it away; state Budget(…, 'std')"
        )
    if not defense.budget.value:
        return math.nan, "there is no noise, so ε is infinite"
    if sensitivity is None:
        return math.nan, (
            "nothing bounds how much one sample changes a message, so ε is infinite; "
            "clip each sample's gradient (dp-sgd), or every message and state the "
            "sensitivity"
        )
    return defense.budget.value / sensitivity, ""


def _epsilon(
    accountants: Any, kind: str, history: list[tuple[float, float, int]], delta: float
) -> float:
    accountant = accountants.create_accountant(mechanism=kind)
    accountant.history = history
    with warnings.catch_warnings():
        # Of orders at the end of the range, where ε is an upper bound all the same.
        warnings.simplefilter("ignore")
        return float(accountant.get_epsilon(delta=delta))

"""The attacks that I²F compares initialisations with, and others by name."""

from __future__ import annotations

from typing import Final

from leakwatch.attacks import Attack, FirstOrder, presets
from leakwatch.attacks.matching.priors import Priors
from leakwatch.reporting.quantities import HIGHER_LESS, Quantity

#: The attacks of I²F, Section 4, by their names there: Adam with step size 0.1; only GS
#: keeps images in their range. Total variation for GS, and steps that shrink, are ours.
PAPER_ATTACKS: Final[dict[str, FirstOrder]] = {
    "dgl": FirstOrder(name="dgl", distance="l2", relative=True, box=False),
    "gs": FirstOrder(name="gs", distance="cosine", priors=Priors(tv=1e-4)),
}


def engine(attack: str | Attack, steps: int) -> Attack:
    """An attack of so many steps.

    Args:
        attack: ``"dgl"``, ``"gs"``, the name of a preset, or an attack object.
        steps: gradient evaluations, at least 1.

    Raises:
        TypeError: for an object of another kind.
        ValueError: for an unknown name, or steps out of range.

    Example:
        >>> engine("dgl", 50).steps
        50
    """
    if isinstance(attack, str):
        paper = PAPER_ATTACKS.get(attack)
        attack = presets.get(attack).attack if paper is None else paper
    change = getattr(attack, "changed", None)
    if change is None or not hasattr(attack, "run"):
        raise TypeError(
            "an attack is 'dgl', 'gs', the name of a preset, or an attack object whose "
            f"number of steps can be changed, got {attack!r}."
        )
    changed: Attack = change(steps=steps)
    return changed


def squared_error(attack: str) -> Quantity:
    """What the errors of an attack are called and mean."""
    return Quantity(
        f"{attack}_mse",
        unit="pixel²",
        direction=HIGHER_LESS,
        meaning=f"Mean squared error of what the attack {attack} rebuilt.",
        source="I²F, Zhang et al., NeurIPS 2023, Sec. 5.3",
    )

"""What a comparison of initialisations comes to, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from leakwatch.reporting.quantities import HEADLINES, knows
from leakwatch.reporting.statistics.achieved import FEWEST_ATTACKS
from leakwatch.reporting.words import NO_RANKS, count, decibels, least
from leakwatch.studies.initializations.points import Point
from leakwatch.studies.initializations.ranking import Ranked, Verdict

__all__ = ["conclude"]

#: dB; less is no disagreement.
_NOTICED: Final = 1.0


def conclude(
    verdict: Verdict,
    attacks: Mapping[str, Sequence[Point]],
    data_range: float,
    prior: str,
) -> str:
    """Say which initialisation exposes least, and whether attacks confirm it.

    Args:
        verdict: of the predicted PSNR.
        attacks: ``<attack>_mse`` ↦ its values, of attacks that were run.
        data_range: peak of the PSNR.
        prior: what predictions take for known of images.
    """
    sentences = [_order(verdict, prior)]
    if verdict.unknown:
        names = ", ".join(group.scheme for group in verdict.unknown)
        sentences.append(f"Not known, which is not safe: {names}.")
    if len(verdict.ranked) > 1:
        sentences += _confirmed(verdict, attacks, data_range)
    return " ".join(sentences)


def _order(verdict: Verdict, prior: str) -> str:
    if not verdict.ranked:
        return "Nothing is known of any initialisation, which does not say it is safe."
    name = verdict.quantity.name
    of_whom = f" of an attacker who {knows(name, prior)}" if name in HEADLINES else ""
    what = f"mean predicted PSNR{of_whom} ({name})"
    most, lowest = verdict.ranked[0], verdict.ranked[-1]
    if len(verdict.ranked) == 1:
        return f"{most.scheme}: {_mean(most)}, {what}."
    if not verdict.told_apart(most.scheme, lowest.scheme):
        why = f" {NO_RANKS[0].upper()}{NO_RANKS[1:]}." if lowest.bounds else ""
        return (
            f"No initialisation is shown to expose less than another: "
            f"{_mean(lowest)} for {lowest.scheme} to {_mean(most)} for "
            f"{most.scheme}, {what}.{why}"
        )
    alike = [
        group.scheme
        for group in verdict.ranked[1:-1]
        if not verdict.told_apart(group.scheme, lowest.scheme)
    ]
    also = ""
    if alike:
        also = f", or one that is not told apart from it ({', '.join(alike)})"
    return (
        f"{lowest.scheme} exposes least{also}: {_mean(lowest)} against "
        f"{_mean(most)} for {most.scheme}, {what}."
    )


def _mean(group: Ranked) -> str:
    return least(decibels(group.mean), group.bounds > 0)


def _confirmed(
    verdict: Verdict, attacks: Mapping[str, Sequence[Point]], data_range: float
) -> list[str]:
    if not attacks:
        return ["No attack was run to confirm it."]
    most, least = verdict.ranked[0].scheme, verdict.ranked[-1].scheme
    sentences = []
    for name, points in attacks.items():
        attack = name.removesuffix("_mse")
        good = [p for p in points if p.matched and p.usable and p.value > 0]
        of = f"{len(good)} of {count(len(points), f'{attack} attack')}"
        if len(good) < FEWEST_ATTACKS:
            sentences.append(f"Attacks could not confirm it: {of} matched.")
            continue
        reached = {
            scheme: [
                10 * math.log10(data_range**2 / p.value)
                for p in good
                if p.scheme == scheme
            ]
            for scheme in (most, least)
        }
        silent = [scheme for scheme, values in reached.items() if not values]
        if silent:
            sentences.append(
                f"Attacks could not confirm it: {of} matched, none of them on "
                f"{' or '.join(silent)}."
            )
            continue
        high, low = fmean(reached[most]), fmean(reached[least])
        apart = f"{decibels(low)} on {least}, {decibels(high)} on {most}"
        said = "confirm" if high > low + _NOTICED else "do not confirm"
        sentences.append(f"Attacks {said} it: {apart} ({of} matched).")
    return sentences

"""What a trade-off comes to, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, final

from leakwatch.reporting.html.conclusions import Conclusion
from leakwatch.reporting.statistics.achieved import FEWEST_ATTACKS
from leakwatch.reporting.words import CLEARLY_ABOVE, count, decibels, least
from leakwatch.studies.trade_offs.grid import NONE
from leakwatch.studies.trade_offs.outcomes import EXACT, Attacker
from leakwatch.studies.trade_offs.rows import Overview, Spread, TradeOffRow

__all__ = ["Lead", "conclude", "lead_of"]

# dB; an attack that did better by less has not beaten its prediction.
_NOTICED: Final = 1.0


@final
@dataclass(frozen=True)
class Lead:
    """The exposure that deserves to lead: it decides every sentence.

    Attributes:
        name: of the quantity, as in the menu of the figure.
        words: the same for readers.
        who: the strongest attacker there is.
        typical: a row ↦ the median over its messages, dB.
        spread: a row ↦ the least and the most exposed of them, dB.
        missing: a row ↦ of how many messages it is not known.
        bounds: a row ↦ of how many messages it is a bound.
    """

    name: str
    words: str
    who: Attacker
    typical: Callable[[TradeOffRow], float]
    spread: Callable[[TradeOffRow], Spread]
    missing: Callable[[TradeOffRow], int]
    bounds: Callable[[TradeOffRow], int]

    def bound(self, row: TradeOffRow) -> bool:
        """Whether a message may be more exposed than `spread` says."""
        return self.missing(row) > 0 or self.bounds(row) > 0 or row.failed > 0


def lead_of(overview: Overview) -> Lead:
    """What attacks achieved where enough of them were conclusive, else the prediction.

    Args:
        overview: of the trade-off.
    """
    who = overview.attackers[-1]
    tried = [row for row in overview.rows if row.messages]
    enough = tried and all(row.conclusive(who) >= FEWEST_ATTACKS for row in tried)
    known = any(not math.isnan(row.predicted[who]) for row in overview.rows)
    if enough or not known:
        return Lead(
            f"{who}_psnr",
            f"PSNR that the {who} attacker achieved",
            who,
            lambda row: row.psnr[who],
            lambda row: row.spread[who],
            lambda row: row.inconclusive[who],
            lambda row: 0,
        )
    return Lead(
        f"{who}_predicted_psnr",
        f"predicted PSNR of the {who} attacker",
        who,
        lambda row: row.predicted[who],
        lambda row: row.predicted_spread[who],
        lambda row: row.unpredicted[who],
        lambda row: row.predicted_bounds[who],
    )


def conclude(overview: Overview) -> list[Conclusion]:
    """Answer what a reader of a trade-off came for.

    Args:
        overview: of the trade-off.
    """
    lead = lead_of(overview)
    answers = {
        f"What holds every message under {CLEARLY_ABOVE:g} dB, at what cost?": (
            _cheapest(overview, lead)
        ),
        "Do attacks confirm it?": _confirmed(overview, lead),
    }
    return [Conclusion(q, " ".join(parts)) for q, parts in answers.items()]


def _cheapest(overview: Overview, lead: Lead) -> Iterator[str]:
    plain = [row for row in overview.rows if row.defense == NONE]
    defended = [row for row in overview.rows if row.defense != NONE and row.messages]
    known = [row for row in defended if not math.isnan(lead.spread(row)[1])]
    under = [row for row in known if lead.spread(row)[1] <= CLEARLY_ABOVE]
    open_ended = [row for row in under if lead.bound(row)]
    holding = [row for row in under if row not in open_ended]
    holding = [row for row in holding if not math.isnan(row.accuracy)]
    over = [row for row in known if row not in under]
    if holding:
        best = max(holding, key=lambda row: row.accuracy)
        lost = plain[0].accuracy - best.accuracy if plain else math.nan
        cost = "" if math.isnan(lost) else f", {_points(lost)} without a defense"
        epsilon = f", ε = {best.epsilon:.3g}" if math.isfinite(best.epsilon) else ""
        yield (
            f"{_name(best, overview)}: at most {_decibels(lead.spread(best)[1])} "
            f"({lead.words}) at an accuracy of {best.accuracy:.1%}{cost}{epsilon}."
        )
    elif over:
        exact = [row for row in over if not lead.bound(row)]
        near = min(exact or over, key=lambda row: lead.spread(row)[1])
        reached = least(_decibels(lead.spread(near)[1]), lead.bound(near))
        yield (
            f"Nothing that was tried{', as far as is known' if open_ended else ''}. "
            f"The least exposing is {_name(near, overview)}, "
            f"whose most exposed message reaches {reached} "
            f"({lead.words}): try larger budgets."
        )
    elif known:
        yield "Not known of anything that was tried."
    else:
        yield "Nothing is known of any defense, which does not say that it is safe."
    for row in open_ended:
        yield (
            f"{_name(row, overview)} reaches at least "
            f"{_decibels(lead.spread(row)[1])}: {_what_is_missing(row, lead)}, which "
            "is not safe."
        )
    if plain and not math.isnan(lead.typical(plain[0])):
        typical = _decibels(lead.typical(plain[0]))
        yield f"Without a defense it is {least(typical, lead.bounds(plain[0]) > 0)}."
    unknown = len(defended) - len(known)
    if unknown and known:
        yield f"{count(unknown, 'setting')} not known, which is not safe."


def _what_is_missing(row: TradeOffRow, lead: Lead) -> str:
    of = f"of {count(row.messages, 'message')}"
    missing, bounds = lead.missing(row), lead.bounds(row)
    parts = [
        f"of {missing} {of} it is not known" if missing else "",
        f"of {bounds} {of} it is a bound" if bounds else "",
        f"{row.failed} of {count(row.cells, 'run')} failed" if row.failed else "",
    ]
    return ", ".join(filter(None, parts))


def _confirmed(overview: Overview, lead: Lead) -> Iterator[str]:
    tried = sum(row.messages for row in overview.rows)
    good = sum(row.conclusive(lead.who) for row in overview.rows)
    of = f"{good} of {count(tried, f'{lead.who} attack')} conclusive"
    if good < FEWEST_ATTACKS:
        yield (
            f"They could not: {of}, and it takes {FEWEST_ATTACKS}. A failed attack "
            "does not say that a message is safe."
        )
        return
    beaten = {
        _name(row, overview): row.psnr[lead.who] - row.predicted[lead.who]
        for row in overview.rows
        if row.conclusive(lead.who)
        and row.predicted[lead.who] < EXACT
        and not row.predicted_bounds[lead.who]
    }
    known = {name: more for name, more in beaten.items() if not math.isnan(more)}
    yield f"{of[0].upper()}{of[1:]}."
    if not known:
        return
    worst = max(known, key=lambda name: known[name])
    if known[worst] > _NOTICED:
        yield (
            f"They did better than predicted, by up to {decibels(known[worst])} in the "
            f"median ({worst}): read predictions as too low."
        )
    else:
        yield f"In no setting did the median exceed its prediction by {_NOTICED:g} dB."


def _name(row: TradeOffRow, overview: Overview) -> str:
    return row.setting.words(overview.unit)


def _points(lost: float) -> str:
    word = "less than" if lost >= 0 else "more than"
    return f"{abs(100 * lost):.1f} points {word}"


def _decibels(value: float) -> str:
    return "exactly the image" if value >= EXACT else decibels(value)

"""What watching costs: what to say of it, and whether a budget allows the next step."""

from __future__ import annotations

import math

__all__ = ["advice", "affordable", "forecast"]

# The share of training that is worth a word, and the one that advice aims at.
_NOTICED = 0.10
_GOOD = 0.05
# Seconds below which nobody minds.
_SHORT = 1.0


def affordable(budget: float, spent: float, elapsed: float, cost: float) -> bool:
    """Whether one more probe step keeps watching within its share of training.

    Args:
        budget: the share, in (0, 1).
        spent: seconds of watching so far.
        elapsed: seconds of training so far, watching included.
        cost: seconds of the last probe step; 0 where there was none.

    Example:
        >>> affordable(0.05, 2.0, 100.0, 2.0), affordable(0.05, 2.0, 60.0, 2.0)
        (True, False)
    """
    return cost == 0 or spent + cost <= budget * (elapsed + cost)


def forecast(cost: float, probes: int, every_n_epochs: int, last: int | None) -> str:
    """What the first probe step took, and what the next ones will.

    Args:
        cost: seconds of the first.
        probes: how many.
        every_n_epochs: the schedule.
        last: epochs of the training; ``None``: not known.

    Example:
        >>> print(forecast(3.2, 32, 5, 20))
        a probe step of 32 probes took 3.2 s; expect about that for each of 4 more
    """
    more = "each further one"
    if last is not None:
        left = last // every_n_epochs
        if not left:
            return ""
        more = f"each of {left} more" if left > 1 else "one more"
    named = "1 probe" if probes == 1 else f"{probes} probes"
    return f"a probe step of {named} took {cost:.1f} s; expect about that for {more}"


def advice(
    cost: float,
    spent: float,
    elapsed: float,
    epochs: int,
    every: int,
    probes: int,
    last: int | None = None,
    *,
    cheaper: bool = True,
) -> str:
    """What would bring the share of watching under 5 %; empty where it is below 10 %.

    Args:
        cost: seconds of the last probe step.
        spent: seconds of watching so far.
        elapsed: seconds of training so far, watching included.
        epochs: completed.
        every: epochs between probe steps.
        probes: how many.
        last: epochs of the training; ``None``: not known.
        cheaper: whether another precision would take less.

    Example:
        >>> advice(2.0, 4.0, 14.0, 2, 1, 32).partition("; ")[2]
        'every_n_epochs=8 or probes=4 would bring it under 5 %'
    """
    training = (elapsed - spent) / max(epochs, 1)
    share = cost / (every * training + cost) if training > 0 else 1.0
    if epochs < 1 or share <= _NOTICED or spent < _SHORT or training <= 0:
        return ""
    allowed = _GOOD / (1 - _GOOD)
    wanted = math.ceil(cost / (allowed * training))
    ways = [] if last is not None and wanted > last else [f"every_n_epochs={wanted}"]
    fewer = int(probes * allowed * every * training / cost)
    if fewer >= 1:
        ways.append(f"probes={fewer}")
    percent = f"{100 * share:.0f} %"
    takes = f"watching takes {percent} of the time from one probe step to the next"
    if not ways:
        less = "; precision='dashboard' takes less" if cheaper else ""
        return f"{takes}, since epochs are short{less}"
    return f"{takes}; {' or '.join(ways)} would bring it under 5 %"

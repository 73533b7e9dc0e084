"""What attacks rebuilt: numbers, pictures, verdicts, and why others say nothing."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from leakwatch.reporting.figures.attacks import achieved_over_epochs, predicted_achieved
from leakwatch.reporting.html.correlations import correlations
from leakwatch.reporting.html.gallery import gallery
from leakwatch.reporting.html.markup import card, esc, figure_panel, table
from leakwatch.reporting.ledger.rows import is_usable, status_reason
from leakwatch.reporting.ledger.table import LedgerTable, Moment
from leakwatch.reporting.message import Message
from leakwatch.reporting.quantities import Quantity
from leakwatch.reporting.statistics.achieved import (
    KINDS,
    Achieved,
    achieved,
    audits,
)
from leakwatch.reporting.words import (
    HARDLY_BELOW,
    count,
    decibels,
    moment_words,
    number,
    psnr_level,
)

__all__ = ["attack_lead", "attack_section"]

_CLIENT: Final = re.compile(r"update/client-(\d+)/(.+)")
_SIMILARITY: Final = "surrogate_similarity"
#: Of each client, with what a reader sees above the column.
_OF_CLIENTS: Final = {
    "psnr": ("mean PSNR", "dB, conclusive attacks"),
    "loss": ("left by the attack", "1 − cos"),
    _SIMILARITY: ("left by the true samples", "1 − cos"),
    "surrogate_mismatch": ("mismatch", "‖δ‖/‖g‖"),
    "seconds": ("time", "s"),
}
_MOST_REASONS: Final = 4
# ‖δ‖/‖g‖; docs/federated.md has what predictions were worth at 0.05 to 0.3.
_EXPLAINED: Final = 0.2


def attack_lead(ledger: LedgerTable) -> str:
    """Return what the latest audit achieved, for the top; empty without one."""
    found = _latest(ledger)
    if not found:
        return ""
    moment, kinds = found
    parts = "; ".join(
        f"{KINDS[kind].partition(' (')[0]}: <strong>{esc(known)}</strong>"
        for kind, known in kinds.items()
    )
    return (
        f'<p class="lead">Attacks that were really run {esc(moment_words(moment))}: '
        f"{parts}.</p>"
    )


def unexplained(ledger: LedgerTable) -> str:
    """Return a caution where one gradient explains little of an update; else empty."""
    found: dict[Moment, list[float]] = {}
    for (when, name), row in ledger.run_level.items():
        match = _CLIENT.fullmatch(name)
        if match and match[2] == "surrogate_mismatch" and row.usable:
            found.setdefault(when, []).append(row.value)
    if not found:
        return ""
    median = statistics.median(found[max(found)])
    if median <= _EXPLAINED:
        return ""
    return (
        f"one gradient does not explain these updates (mismatch {number(median)} in "
        "the median): predictions are no bounds here, neither are attacks that take an "
        "update for one gradient"
    )


def attack_section(
    ledger: LedgerTable,
    attacks: Sequence[Mapping[str, Any]],
    class_names: Sequence[str] | None,
    message: Message,
    quantities: Mapping[str, Quantity],
) -> str:
    """Return the results of the latest audit and their course; empty without one.

    Args:
        ledger: The run.
        attacks: Its reconstructions.
        class_names: By label.
        message: What was attacked.
        quantities: Descriptions, which give the direction of scores.
    """
    found = _latest(ledger)
    if not found:
        return ""
    moment, kinds = found
    clients = _clients(ledger, moment)
    parts = [
        f'<p class="soft">{esc(message.attacked.format(when=moment_words(moment)))} '
        f"An attack that did not match its {message.noun} is inconclusive: it failed, "
        "which says nothing about the sample, and its numbers enter no summary.</p>",
        '<div class="cards">'
        + "".join(_card(kind, known) for kind, known in kinds.items())
        + _baseline(ledger, moment, message)
        + "</div>",
        '<div class="two">'
        + figure_panel("fig-achieved", achieved_over_epochs(ledger))
        + figure_panel("fig-predicted", predicted_achieved(ledger, moment, class_names))
        + "</div>",
        _inconclusive(ledger, moment, list(kinds)),
        gallery(ledger, moment, attacks, list(kinds), class_names),
        clients,
        correlations(ledger, moment, kinds, quantities),
    ]
    return "\n".join(part for part in parts if part)


def _latest(ledger: LedgerTable) -> tuple[Moment, dict[str, Achieved]] | None:
    moments = audits(ledger)
    if not moments:
        return None
    moment = moments[-1]
    found = {kind: achieved(ledger, moment, kind) for kind in KINDS}
    return moment, {k: a for k, a in found.items() if a is not None}


def _card(kind: str, known: Achieved) -> str:
    if not known.conclusive:
        return card(KINDS[kind], "not known", known.note(), level="unknown")
    if math.isnan(known.median):
        return card(
            KINDS[kind], f"{known.recovered} of {known.conclusive}", known.note()
        )
    # A low PSNR of an attack is no good news, even of one that matched: a stronger
    # attacker may tell apart what this one could not.
    level = psnr_level(known.median) if known.median >= HARDLY_BELOW else ""
    return card(
        KINDS[kind],
        decibels(known.median),
        f"median PSNR {known.note()}",
        level=level,
    )


def _baseline(ledger: LedgerTable, moment: Moment, message: Message) -> str:
    constant = ledger.columns.get((moment, "audit/baseline/constant_psnr"))
    mean = ledger.columns.get((moment, "audit/baseline/mean_psnr"))
    if constant is None or mean is None:
        return ""
    return card(
        f"blind guess, without any {message.noun}",
        decibels(float(np.median(constant.values))),
        f"median PSNR of the best image of one colour; the mean image of the data "
        f"reaches {decibels(float(np.median(mean.values)))}",
    )


def _inconclusive(ledger: LedgerTable, moment: Moment, kinds: Sequence[str]) -> str:
    items = []
    for kind in kinds:
        verdict = ledger.columns[moment, f"audit/{kind}/verdict"]
        reasons = Counter(
            status_reason(status) or status
            for value, status in zip(verdict.values, verdict.statuses, strict=True)
            if not is_usable(value, status)
        )
        shown = reasons.most_common(_MOST_REASONS)
        items += [
            f"<li><strong>{esc(KINDS[kind])}, {count(number_of, 'sample')}:</strong> "
            f"{esc(reason)}</li>"
            for reason, number_of in shown
        ]
        left = sum(reasons.values()) - sum(number_of for _, number_of in shown)
        if left:
            items.append(
                f"<li><strong>{esc(KINDS[kind])}, {count(left, 'sample')} "
                "more:</strong> for like reasons, which the ledger holds</li>"
            )
    if not items:
        return ""
    return (
        '<div class="notice"><strong>Inconclusive attacks.</strong> Their numbers are '
        "left out, for these reasons. That they failed makes no sample safe; what can "
        f"be recognised in their pictures has leaked.<ul>{''.join(items)}</ul></div>"
    )


def _clients(ledger: LedgerTable, moment: Moment) -> str:
    """Return what was measured of each client; empty without clients."""
    found: dict[int, dict[str, str]] = {}
    for (when, name), row in ledger.run_level.items():
        match = _CLIENT.fullmatch(name)
        if match and when == moment and match[2] in _OF_CLIENTS:
            value = 1 - row.value if match[2] == _SIMILARITY else row.value
            text = number(value) if row.usable else "not known"
            found.setdefault(int(match[1]), {})[match[2]] = text
    if not found:
        return ""
    head = ['<th scope="col">client</th>'] + [
        f'<th scope="col" class="num">{esc(title)}<small>{esc(unit)}</small></th>'
        for title, unit in _OF_CLIENTS.values()
    ]
    rows = [
        f'<tr><td class="name">#{client}</td>'
        + "".join(
            f'<td class="num">{esc(cells.get(name, "not known"))}</td>'
            for name in _OF_CLIENTS
        )
        + "</tr>"
        for client, cells in sorted(found.items())
    ]
    words = (
        "How much of each client's update the reconstruction leaves unexplained, and "
        "how much the true samples would. Where these leave much, one gradient does "
        "not explain the update: an attack that matches more than they do is no nearer "
        "to them, and more steps don't help."
    )
    return f'<p class="soft">{esc(words)}</p>' + table(head, rows, "By client")

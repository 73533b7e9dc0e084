"""What attacks rebuilt: numbers, pictures, verdicts, and why others say nothing."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np

from leakwatch.reporting.figures.attacks import achieved_over_epochs, predicted_achieved
from leakwatch.reporting.html.correlations import Correlations, make_correlations
from leakwatch.reporting.html.markup import (
    Badge,
    Card,
    Panel,
    data_uri,
    make_panels,
    thumbnail,
)
from leakwatch.reporting.ledger.rows import Row, status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable, Moment
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.achieved import (
    KINDS,
    Achieved,
    achieved,
    audits,
    conclusive_values,
)
from leakwatch.reporting.words import (
    HARDLY_BELOW,
    count,
    decibels,
    moment_words,
    number,
    psnr_level,
)

__all__ = [
    "AttackLead",
    "AttackSection",
    "make_attack_lead",
    "make_attacks",
    "unexplained",
]

_CLIENT: Final = re.compile(r"update/client-(\d+)/(.+)")
_SIMILARITY: Final = "surrogate_similarity"
#: Of each client, in the order of the table.
_OF_CLIENTS: Final = ("psnr", "loss", _SIMILARITY, "surrogate_mismatch", "seconds")
_MOST_REASONS: Final = 4
_MOST_SHOWN: Final = 60
# Fewer where several audits are shown, by the slider.
_MOST_COMPARED: Final = 24
# Characters of all pictures of the gallery together.
_MOST_PICTURES: Final = 700_000
# Pixels a side, as they are drawn.
_LARGEST: Final = 64
_NUMBERS: Final = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_WORDS: Final = {1.0: "recovered", 0.5: "partly", 0.0: "not recovered"}
# ‖δ‖/‖g‖; docs/measurements/federated.md: what predictions were worth at 0.05 to 0.3.
_EXPLAINED: Final = 0.2


class KindResult(NamedTuple):
    """A kind of attack and what it came to, in words."""

    name: str
    result: str


class AttackLead(NamedTuple):
    """What the latest audit achieved, for the top of the report."""

    when: str
    kinds: tuple[KindResult, ...]


class Inconclusive(NamedTuple):
    """Why attacks on some samples are inconclusive."""

    kind: str
    samples: str
    reason: str


class Result(NamedTuple):
    """A reconstruction: address of its picture (may be empty), PSNR, verdict."""

    image: str
    psnr: str
    level: str
    verdict: Badge


class GalleryRow(NamedTuple):
    """An attacked sample: its class, its picture, and its reconstructions.

    ``results`` has an entry for each kind of attack, which has one for each moment;
    None where the sample was not attacked.
    """

    sample: int
    name: str
    original: str
    results: tuple[tuple[Result | None, ...], ...]


class Gallery(NamedTuple):
    """Originals beside reconstructions, of one audit at a time.

    Attributes:
        kinds: Of attack.
        moments: In words, oldest first; the last is shown first.
        rows: Of samples.
        more: How many samples are left out; empty if none.
        skipped: How many audits are left out; empty if none.
    """

    kinds: tuple[str, ...]
    moments: tuple[str, ...]
    rows: tuple[GalleryRow, ...]
    more: str
    skipped: str


@final
@dataclass(frozen=True)
class AttackSection:
    """What the section on attacks shows.

    Attributes:
        attacked: What was attacked, a sentence.
        noun: What a client shares.
        cards: Results, and what a blind guess reaches.
        figures: Course over training, and prediction against result.
        inconclusive: Why attacks say nothing, most frequent reason first.
        gallery: Pictures, where they were kept.
        clients: Name and values, in words, of each client of a federated run.
        correlations: Which scores foresaw it.
    """

    attacked: str
    noun: str
    cards: tuple[Card, ...]
    figures: tuple[Panel, ...]
    inconclusive: tuple[Inconclusive, ...]
    gallery: Gallery | None
    clients: tuple[tuple[int, tuple[str, ...]], ...]
    correlations: Correlations | None


def make_attack_lead(ledger: LedgerTable) -> AttackLead | None:
    """Return what the latest audit achieved; None without one."""
    moment, kinds = _latest(ledger)
    if moment is None:
        return None
    return AttackLead(
        moment_words(moment),
        tuple(
            KindResult(KINDS[kind].partition(" (")[0], str(result))
            for kind, result in kinds.items()
        ),
    )


def unexplained(ledger: LedgerTable) -> str:
    """Return a caution where one gradient explains little of an update; else empty."""
    mismatches: dict[Moment, list[float]] = {}
    for when, _, name, row in _client_rows(ledger):
        if name == "surrogate_mismatch" and row.usable:
            mismatches.setdefault(when, []).append(row.value)
    median = statistics.median(mismatches[max(mismatches)]) if mismatches else 0.0
    if median <= _EXPLAINED:
        return ""
    return (
        f"one gradient does not explain these updates (mismatch {number(median)} in "
        "the median): predictions are no bounds here, neither are attacks that take an "
        "update for one gradient"
    )


def make_attacks(
    ledger: LedgerTable, attacks: Sequence[Mapping[str, Any]], facts: RunFacts
) -> AttackSection | None:
    """Return the results of the latest audit and their course; None without one.

    Args:
        ledger: The run.
        attacks: Its reconstructions.
        facts: Of the run.
    """
    moment, kinds = _latest(ledger)
    if moment is None:
        return None
    predicted = predicted_achieved(ledger, moment, facts.class_names)
    return AttackSection(
        attacked=facts.message.attacked.format(when=moment_words(moment)),
        noun=facts.message.noun,
        cards=(
            *(_card(kind, result) for kind, result in kinds.items()),
            *_baseline(ledger, moment, facts.message.noun),
        ),
        figures=make_panels(
            ("fig-achieved", achieved_over_epochs(ledger)),
            ("fig-predicted", predicted),
        ),
        inconclusive=tuple(r for kind in kinds for r in _reasons(ledger, moment, kind)),
        gallery=_gallery(ledger, moment, attacks, tuple(kinds), facts),
        clients=_clients(ledger, moment),
        correlations=make_correlations(ledger, moment, kinds, facts.quantities),
    )


def _latest(ledger: LedgerTable) -> tuple[Moment | None, dict[str, Achieved]]:
    moments = audits(ledger)
    if not moments:
        return None, {}
    results = {kind: achieved(ledger, moments[-1], kind) for kind in KINDS}
    return moments[-1], {k: r for k, r in results.items() if r is not None}


def _card(kind: str, result: Achieved) -> Card:
    name, note = KINDS[kind], result.note()
    if not result.conclusive:
        return Card(name, "not known", note, "unknown")
    if math.isnan(result.median):
        return Card(name, f"{result.recovered} of {result.conclusive}", note)
    note = f"median PSNR {note}"
    return Card(name, decibels(result.median), note, _level(result.median))


def _level(psnr: float) -> str:
    # A low PSNR of an attack is no good news, even of one that matched: a stronger
    # attacker may tell apart what this one could not.
    return psnr_level(psnr) if psnr >= HARDLY_BELOW else ""


def _baseline(ledger: LedgerTable, moment: Moment, noun: str) -> list[Card]:
    constant = ledger.columns.get((moment, "audit/baseline/constant_psnr"))
    mean = ledger.columns.get((moment, "audit/baseline/mean_psnr"))
    if constant is None or mean is None:
        return []
    return [
        Card(
            f"blind guess, without any {noun}",
            decibels(float(np.median(constant.values))),
            "median PSNR of the best image of one colour; the mean image of the data "
            f"reaches {decibels(float(np.median(mean.values)))}",
        )
    ]


def _reasons(ledger: LedgerTable, moment: Moment, kind: str) -> list[Inconclusive]:
    verdict = ledger.columns[moment, f"audit/{kind}/verdict"]
    alike: dict[str, list[str]] = {}
    for value in verdict:
        if not value.usable:
            reason = status_reason(value.status) or value.status
            alike.setdefault(_NUMBERS.sub("#", reason), []).append(reason)
    ordered = sorted(alike.values(), key=len, reverse=True)
    groups = [
        Inconclusive(KINDS[kind], count(len(reasons), "sample"), _together(reasons))
        for reasons in ordered[:_MOST_REASONS]
    ]
    left = sum(map(len, ordered[_MOST_REASONS:]))
    if left:
        words = "for other reasons, which the ledger holds"
        groups.append(Inconclusive(KINDS[kind], f"{count(left, 'sample')} more", words))
    return groups


def _together(reasons: Sequence[str]) -> str:
    """One sentence for several that differ in their numbers, from least to most.

    Example:
        >>> _together(["33 % of it, where grey leaves 79 %", "30 % of it, where grey "
        ...            "leaves 79 %"])
        '30 to 33 % of it, where grey leaves 79 %'
    """
    columns = zip(*map(_NUMBERS.findall, reasons), strict=True)
    ends = ((min(c, key=float), max(c, key=float)) for c in columns)
    spans = iter([a if a == b else f"{a} to {b}" for a, b in ends])
    return _NUMBERS.sub(lambda _: next(spans), reasons[0])


def _clients(
    ledger: LedgerTable, moment: Moment
) -> tuple[tuple[int, tuple[str, ...]], ...]:
    """Return what was measured of each client."""
    clients: dict[int, dict[str, str]] = {}
    for when, client, name, row in _client_rows(ledger):
        if when == moment:
            value = 1 - row.value if name == _SIMILARITY else row.value
            text = number(value) if row.usable else "not known"
            clients.setdefault(client, {})[name] = text
    return tuple(
        (client, tuple(values.get(name, "not known") for name in _OF_CLIENTS))
        for client, values in sorted(clients.items())
    )


def _client_rows(ledger: LedgerTable) -> Iterator[tuple[Moment, int, str, Row]]:
    """Yield moment, client and quantity of what was measured of clients."""
    for (when, name), row in ledger.run_level.items():
        match = _CLIENT.fullmatch(name)
        if match:
            yield when, int(match[1]), match[2], row


def _gallery(
    ledger: LedgerTable,
    moment: Moment,
    attacks: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    facts: RunFacts,
) -> Gallery | None:
    """Return original and reconstructions of each attacked sample, audit by audit."""
    kept = {
        Moment(int(arrays["epoch"]), int(arrays["step"])): arrays
        for arrays in attacks
        if "original" in arrays
    }
    if moment not in kept:
        return None
    shown = kept[moment]
    place = {int(sample): i for i, sample in enumerate(shown["sample"])}
    classes = (None if y < 0 else y for y in shown["class"].tolist())
    labels = dict(zip(place, classes, strict=True))
    order = _best_first(ledger, moment, labels, kinds)
    rows: list[tuple[int, str, list[Result | None]]] = []
    size = 0
    for sample in order[: _MOST_SHOWN if len(kept) == 1 else _MOST_COMPARED]:
        original = data_uri(thumbnail(shown["original"][place[sample]], _LARGEST))
        latest = [_result(ledger, moment, kind, sample, shown) for kind in kinds]
        size += len(original) + sum(len(r.image) for r in latest if r is not None)
        if rows and size > _MOST_PICTURES:
            break
        rows.append((sample, original, latest))
    # Later audits weigh about what the last one does.
    moments = _evenly(sorted(kept), max(_MOST_PICTURES // max(size, 1), 1))
    skipped = len(kept) - len(moments)
    more = len(order) - len(rows)
    return Gallery(
        kinds=tuple(KINDS[kind] for kind in kinds),
        moments=tuple(map(moment_words, moments)),
        rows=tuple(
            GalleryRow(
                sample=sample,
                name=facts.class_label(labels[sample]),
                original=original,
                results=tuple(
                    (
                        *(
                            _result(ledger, when, kind, sample, kept[when])
                            for when in moments[:-1]
                        ),
                        last,
                    )
                    for kind, last in zip(kinds, latest, strict=True)
                ),
            )
            for sample, original, latest in rows
        ),
        more=count(more, "sample") if more > 0 else "",
        skipped=count(skipped, "audit") if skipped else "",
    )


def _evenly(moments: Sequence[Moment], most: int) -> list[Moment]:
    """At most so many moments, evenly spread; the first, and always the last."""
    if most == 1:
        return [moments[-1]]
    places = np.linspace(0, len(moments) - 1, min(most, len(moments))).round()
    return [moments[int(place)] for place in places]


def _best_first(
    ledger: LedgerTable,
    moment: Moment,
    labels: Mapping[int, int | None],
    kinds: Sequence[str],
) -> list[int]:
    """Sort samples by class, the class of the best reconstruction first."""
    columns = [conclusive_values(ledger, moment, kind, "psnr") for kind in kinds]

    def best(sample: int) -> float:
        reached = [c.at(sample).value for c in columns if c is not None]
        return max((v for v in reached if not math.isnan(v)), default=-math.inf)

    worst = {y: max(best(s) for s in labels if labels[s] == y) for y in labels.values()}
    return sorted(labels, key=lambda s: (-worst[labels[s]], labels[s], -best(s)))


def _result(
    ledger: LedgerTable,
    moment: Moment,
    kind: str,
    sample: int,
    shown: Mapping[str, Any],
) -> Result | None:
    """What an attack made of a sample; None if there was none on it."""
    verdicts = ledger.columns.get((moment, f"audit/{kind}/verdict"))
    if verdicts is None or sample not in verdicts.samples:
        return None
    psnr = ledger.columns.get((moment, f"audit/{kind}/psnr"))
    value = math.nan if psnr is None else psnr.at(sample).value
    verdict = verdicts.at(sample)
    if verdict.usable:
        word = _WORDS.get(verdict.value, "not known")
        style, level = "about" if verdict.value < 0.5 else "bad", _level(value)
    else:
        word = "failed" if status_word(verdict.status) == "failed" else "inconclusive"
        style, level = "about", "soft"
    image = ""
    places = np.flatnonzero(np.asarray(shown["sample"]) == sample)
    if kind in shown and places.size:
        image = data_uri(thumbnail(shown[kind][places[0]], _LARGEST))
    text = "" if math.isnan(value) else decibels(value)
    return Result(image, text, level, Badge(word, style, verdict.status))

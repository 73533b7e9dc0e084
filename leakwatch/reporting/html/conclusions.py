"""What a run comes to: answers in sentences, each with the number behind it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, Final, NamedTuple

import numpy as np

from leakwatch.reporting.ledger.table import LedgerTable, LedgerValue
from leakwatch.reporting.message import UPDATE
from leakwatch.reporting.noise_call import noise_call
from leakwatch.reporting.quantities import LAYERS
from leakwatch.reporting.run_facts import RunFacts
from leakwatch.reporting.statistics.achieved import (
    FEWEST_ATTACKS,
    KINDS,
    achieved,
    audits,
    conclusive_values,
)
from leakwatch.reporting.statistics.aggregates import summarize, summarize_classes
from leakwatch.reporting.statistics.gate import at_most
from leakwatch.reporting.statistics.headline import Headline
from leakwatch.reporting.words import (
    CLEARLY_ABOVE,
    HARDLY_BELOW,
    NO_RANKS,
    count,
    decibels,
    least,
    moment_words,
    number,
    psnr_words,
)

__all__ = ["Conclusion", "conclude"]

# dB; less is no change, and no attack that did better than was predicted.
_NOTICED: Final = 1.0
# More than that is a prediction that failed; so far below it an attack did.
_NEARLY: Final = 3.0
_FAR: Final = 10.0

_NOISE: Final = ("noise_std_for_range_psnr", "noise_std_for_psnr")


class Conclusion(NamedTuple):
    """A question that a reader of a report has, and its answer."""

    question: str
    answer: str


def conclude(
    everything: LedgerTable,
    headline: Headline | None,
    facts: RunFacts,
    metadata: Mapping[str, Any],
    beside: Sequence[str] = (),
) -> list[Conclusion]:
    """Answer what a reader came for; nothing where the run predicts no PSNR.

    Args:
        everything: All that was recorded.
        headline: The predicted PSNR, if the run predicts one.
        facts: Of the run.
        metadata: Content of ``run.json``.
        beside: Folders of audits of the same network, see `audits_beside`.
    """
    if headline is None or not headline.summary.used:
        return []
    answers = {
        "Who is worst off, and is it rising?": [
            *_worst(headline, facts),
            *_attacked_alone(everything, headline),
        ],
        f"How many are above {CLEARLY_ABOVE:g} dB?": _above(headline),
        "Does the prediction deserve trust?": [
            *_bounds(headline),
            *_trust(everything, headline, beside),
        ],
        "What to do next?": _next(everything, headline, facts, metadata),
    }
    return [Conclusion(q, " ".join(parts)) for q, parts in answers.items()]


def _worst(headline: Headline, facts: RunFacts) -> Iterable[str]:
    summary, column = headline.summary, headline.column
    sample = summary.worst_sample
    if sample is not None:
        label = column.labels[column.samples.index(sample)]
        of_class = "" if label is None else f" ({facts.class_label(label)})"
        own = column.at(sample)
        yield (
            f"Sample #{sample}{of_class}: "
            f"{least(decibels(own.value), own.bound, own.estimated)}, "
            f"{psnr_words(own.value, own.bound)}{_risen(own, headline.worst_before)}."
        )
    if summary.bounds:
        yield f"Another may be worse off, since {NO_RANKS}."
    means = [row for row in summarize_classes(column) if not math.isnan(row.mean)]
    if len(means) > 1 and not any(row.bounds for row in means):
        high = max(means, key=lambda row: row.mean)
        low = min(means, key=lambda row: row.mean)
        basis = "on average" if high.used > 1 else "(one sample)"
        yield (
            f"Of classes, {facts.class_label(high.label)} is worst off: "
            f"{least(decibels(high.mean), False, high.estimated)} {basis}, "
            f"{facts.class_label(low.label)} has "
            f"{least(decibels(low.mean), False, low.estimated)}."
        )
    if math.isfinite(headline.change):
        changed = _changed(headline.change)
        if headline.change_of_bounds:
            changed += ", as far as bounds show,"
        later = headline.last_change
        turned = math.copysign(1, later) != math.copysign(1, headline.change)
        since = (
            f", and {_changed(later)} since the probe before this one"
            if turned and abs(later) >= _NOTICED
            else ""
        )
        of = "The median"
        if headline.compared < summary.count:
            of += f" of the {headline.compared} with a number then and now"
        yield f"{of} {changed} since the first probe{since}."
    if headline.peak_moment is not None and headline.peak > summary.worst + _NOTICED:
        yield (
            f"The worst moment was {moment_words(headline.peak_moment)}, with "
            + least(
                decibels(headline.peak), headline.peak_bound, headline.peak_estimated
            )
            + "."
        )


def _attacked_alone(everything: LedgerTable, headline: Headline) -> Iterable[str]:
    """Name a sample that has no prediction, and that attacks show to be exposed."""
    found = [
        (value, sample)
        for moment in audits(everything)[-1:]
        for kind in KINDS
        if (reached := conclusive_values(everything, moment, kind, "psnr")) is not None
        for value, sample in zip(reached.usable_values, reached.samples, strict=True)
        if not headline.column.at(sample).usable and value > headline.summary.worst
    ]
    if found:
        value, sample = max(found)
        yield (
            f"Sample #{sample} has no prediction, and an attack came to "
            f"{decibels(float(value))} on it: it is worse off."
        )


def _risen(now: LedgerValue, before: LedgerValue | None) -> str:
    """Say what became of a sample since the first probe; empty with one probe."""
    if before is None:
        return ""
    if not before.usable:
        return "; what it was at the first probe is not known"
    shown = ", as far as bounds show," if now.bound or before.bound else ""
    return f"; it {_changed(now.value - before.value)}{shown} since the first probe"


def _changed(change: float) -> str:
    size = decibels(abs(change))
    if abs(change) < _NOTICED:
        return f"hardly changed ({size})"
    return f"{'rose' if change > 0 else 'fell'} by {size}"


def _above(headline: Headline) -> Iterable[str]:
    summary = headline.summary
    more = summary.bounds > 0 and headline.clearly < summary.used
    said = f"{headline.clearly} of {count(summary.used, 'sample')} with a number."
    yield f"At least {said}" if more else said
    unknown = summary.count - summary.used
    if unknown:
        has = "has" if unknown == 1 else "have"
        yield f"{unknown} more {has} no number, which is not safe."


def _bounds(headline: Headline) -> Iterable[str]:
    """Say what is left open where predictions are bounds."""
    column, some = headline.column, headline.summary.bounds
    if not some:
        return
    up_to = [at_most(s) for s in compress(column.statuses, column.bounds)]
    finite = [value for value in up_to if math.isfinite(value)]
    said = f"{some} of {count(headline.summary.used, 'prediction')} are lower bounds: "
    if not finite:
        said += "exposure is at least that, up to what is not known"
    else:
        said += f"exposure is at least that, and may be up to {decibels(max(finite))}"
        open_ended = some - len(finite)
        if open_ended:
            said += f"; of {open_ended} it is not known up to what"
    yield f"{said}. precision='exact' has the numbers, and takes longer."


def _trust(
    everything: LedgerTable, headline: Headline, beside: Sequence[str]
) -> Iterable[str]:
    moments = audits(everything)
    if not moments:
        yield "Nothing in this record has tested it: it holds no attack."
        if beside:
            yield f"Attacks on the same network are recorded in {', '.join(beside)}."
        else:
            yield "InversionAudit runs some."
        return
    moment = moments[-1]
    predicted = everything.columns.get((moment, headline.quantity))
    told: list[str] = []
    few = False
    pairs: list[tuple[float, float]] = []
    for kind, words in KINDS.items():
        outcome = achieved(everything, moment, kind)
        if outcome is None:
            continue
        name = words.partition(" (")[0]
        if not outcome.conclusive:
            told.append(
                f"None of {count(outcome.attacked, f'{name} attack')} was conclusive: "
                "they tested nothing, and show no safety."
            )
            continue
        said = (
            f"{outcome.conclusive} of {outcome.attacked} {name} attacks were conclusive"
        )
        reached = conclusive_values(everything, moment, kind, "psnr")
        if reached is None or predicted is None:
            told.append(f"{said}.")
            continue
        at = dict(zip(predicted.samples, predicted.usable_values, strict=True))
        both = [
            (float(value), float(at.get(sample, math.nan)))
            for value, sample in zip(
                reached.usable_values, reached.samples, strict=True
            )
            if not math.isnan(value)
        ]
        mine = [pair for pair in both if not math.isnan(pair[1])]
        blind = [value for value, foreseen in both if math.isnan(foreseen)]
        pairs += mine
        if mine:
            more = [value - foreseen for value, foreseen in mine]
            said += f" (median {decibels(float(np.median(more)))} from the prediction"
            below = sum(m < -_FAR for m in more)
            if below:
                said += f", {below} more than {_FAR:g} dB below it"
            said += ")"
        told.append(f"{said}.")
        if blind:
            told.append(
                f"Of these {len(blind)} had no prediction: the best came to "
                f"{decibels(max(blind))}."
            )
        few = few or outcome.conclusive < FEWEST_ATTACKS
    if pairs:
        yield _verdict(pairs)
    yield from told
    if few:
        yield f"A correlation takes {FEWEST_ATTACKS} conclusive attacks of a kind."


def _verdict(pairs: Sequence[tuple[float, float]]) -> str:
    """Whether attacks did better than predicted, from what both came to."""
    # An attack that stayed far below has not tested what it could not reach.
    near = [pair for pair in pairs if pair[0] - pair[1] >= -_FAR]
    if not near:
        return f"Not tested: no attack came within {_FAR:g} dB of its prediction."
    tested = count(len(near), "attack")
    beat = [pair for pair in near if pair[0] - pair[1] > _NOTICED]
    if not beat:
        few = len(near) < FEWEST_ATTACKS
        yes = f"As far as {tested} can show, yes" if few else "Yes"
        none = "none" if few else f"none of {tested}"
        return f"{yes}: {none} did better than predicted by {_NOTICED:g} dB or more."
    value, foreseen = max(beat, key=lambda pair: pair[0] - pair[1])
    nearly = value - foreseen <= _NEARLY
    word, follows = ("Nearly", "") if nearly else ("No", ": read it as too low")
    return (
        f"{word}: {len(beat)} of {tested} did better than predicted, one by "
        f"{decibels(value - foreseen)} ({decibels(value)} where {decibels(foreseen)} "
        f"was predicted){follows}."
    )


def _next(
    everything: LedgerTable,
    headline: Headline,
    facts: RunFacts,
    metadata: Mapping[str, Any],
) -> Iterable[str]:
    worst = headline.summary.worst
    bound = headline.summary.bounds > 0
    if bound and not worst > HARDLY_BELOW:
        yield (
            f"No sample is known to be above {HARDLY_BELOW:g} dB, but bounds show no "
            "safety: measure with precision='exact', or attack."
        )
    elif not worst > HARDLY_BELOW:
        yield (
            f"No sample with a number is predicted above {HARDLY_BELOW:g} dB under "
            "these assumptions; attack them before you rely on it."
        )
    elif facts.message is UPDATE:
        yield (
            "leakwatch.recommend_noise(…) speaks of single gradients: what noise does "
            "to an update, only an audit of noisy updates shows."
        )
    else:
        yield from _noise(everything, headline, metadata)
    shares = {
        name.removeprefix(LAYERS): summarize(column, 1).median
        for name, column in everything.at(headline.moment).items()
        if name.startswith(LAYERS)
    }
    known = {name: share for name, share in shares.items() if not math.isnan(share)}
    if known:
        most = max(known, key=lambda name: known[name])
        yield f"The layer {most} holds {known[most]:.0%} of Σλ: share it least."
    peak = headline.peak_moment
    if peak is not None and peak.step == 0 and headline.peak > worst + _NOTICED:
        yield (
            "Most is exposed before training: another initialisation may expose less "
            "(leakwatch compare-inits)."
        )


def _noise(
    everything: LedgerTable, headline: Headline, metadata: Mapping[str, Any]
) -> Iterable[str]:
    config = metadata.get("config")
    target = config.get("target_psnr", 20.0) if isinstance(config, Mapping) else 20.0
    call = noise_call(metadata, target)
    for name in _NOISE:
        column = everything.columns.get((headline.moment, name))
        summary = None if column is None else summarize(column, 1)
        if summary is not None and summary.used:
            some = "all samples"
            if summary.used < summary.count:
                some = f"{summary.used} of {count(summary.count, 'sample')}"
            least_noise = least(
                number(summary.worst), summary.bounds > 0, summary.worst_estimated
            )
            yield (
                f"Noise of standard deviation {least_noise} on each entry of the "
                f"gradient would keep {some} below {target:g} dB by prediction; "
                f"{call} checks it by attacks."
            )
            break
    else:
        recorded = "noise_std_for_psnr"
        if headline.quantity == "i2f_range_psnr":
            recorded = "noise_std_for_range_psnr"
        yield (
            f"Which noise keeps predictions below {target:g} dB was not recorded: "
            f"{call} finds it and checks it by attacks; '{recorded}' among the "
            "monitor's scores= shows it here."
        )
    x, more = "as it gets them", ""
    if "images" in call:
        more = ", images samples of the data set in pixel units, as a tensor"
    if "prepare" in call:
        x = "of the data set"
        more += (
            ", prepare does to a batch of inputs what training does to them before "
            "the network gets them"
        )
    yield (
        f"In the call, net is the trained network, x and y are samples {x}{more}; "
        f"progress=print tells how far it is."
    )

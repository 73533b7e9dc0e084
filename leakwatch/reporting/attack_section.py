"""What attacks rebuilt: pictures, verdicts, and which scores foresaw it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from leakwatch.reporting.attack_figures import achieved_over_epochs, predicted_achieved
from leakwatch.reporting.markup import card, esc, figure_panel, table
from leakwatch.reporting.png import data_uri, thumbnail
from leakwatch.reporting.quantities import class_label
from leakwatch.reporting.rows import is_usable, status_reason, status_word
from leakwatch.reporting.table import Column, LedgerTable, Moment
from leakwatch.reporting.words import (
    HARDLY_BELOW,
    count,
    decibels,
    moment_words,
    psnr_level,
)

__all__ = ["KINDS", "attack_section", "audited"]

#: Kind of start, as in the names of quantities → what readers call it.
KINDS: Final = {
    "near": "worst case (starts beside the sample)",
    "random": "practical (starts at noise)",
}
_SPEARMAN: Final = "audit/spearman/"
_MOST_SHOWN: Final = 60
_WORDS: Final = {1.0: "recovered", 0.5: "partly", 0.0: "not recovered"}


def audited(ledger: LedgerTable) -> bool:
    """Whether any probe of the run was attacked."""
    return any(name.startswith("audit/") for name in ledger.quantities)


def attack_section(
    ledger: LedgerTable,
    attacks: Sequence[Mapping[str, Any]],
    class_names: Sequence[str] | None,
) -> str:
    """Return the results of the latest audit and their course; empty without one."""
    moments = sorted({m for m, name in ledger.columns if name.startswith("audit/")})
    if not moments:
        return ""
    moment = moments[-1]
    kinds = [k for k in KINDS if (moment, f"audit/{k}/verdict") in ledger.columns]
    parts = [
        f'<p class="soft">Gradients of watched samples were attacked '
        f"{esc(moment_words(moment))}. An attack that did not match its gradient is "
        f"inconclusive: it failed, which says nothing about the sample.</p>",
        '<div class="cards">'
        + "".join(_card(ledger, moment, kind) for kind in kinds)
        + _baseline(ledger, moment)
        + "</div>",
        '<div class="two">'
        + figure_panel("fig-achieved", achieved_over_epochs(ledger))
        + figure_panel("fig-predicted", predicted_achieved(ledger, moment, class_names))
        + "</div>",
        _gallery(ledger, moment, attacks, kinds, class_names),
        _correlations(ledger, moment, kinds),
        _inconclusive(ledger, moment, kinds),
    ]
    return "\n".join(part for part in parts if part)


def _card(ledger: LedgerTable, moment: Moment, kind: str) -> str:
    psnr = ledger.columns.get((moment, f"audit/{kind}/psnr"))
    verdict = ledger.columns[moment, f"audit/{kind}/verdict"]
    median = math.nan
    if psnr is not None and np.isfinite(psnr.values).any():
        median = float(np.median(psnr.values[np.isfinite(psnr.values)]))
    n, known = len(verdict.samples), verdict.usable
    recovered = int((verdict.values[known] == 1.0).sum())
    partly = int((verdict.values[known] == 0.5).sum())
    note = (
        f"median PSNR; of {count(n, 'sample')} {recovered} recovered, {partly} partly, "
        f"{int((~known).sum())} inconclusive"
    )
    # A low PSNR of an attack is no good news: the attack may simply have failed.
    level = psnr_level(median) if median >= HARDLY_BELOW else ""
    return card(KINDS[kind], decibels(median), note, level=level)


def _baseline(ledger: LedgerTable, moment: Moment) -> str:
    constant = ledger.columns.get((moment, "audit/baseline/constant_psnr"))
    mean = ledger.columns.get((moment, "audit/baseline/mean_psnr"))
    if constant is None or mean is None:
        return ""
    return card(
        "without any gradient",
        decibels(float(np.median(constant.values))),
        f"median PSNR of the best image of one colour; the mean image of the data "
        f"reaches {decibels(float(np.median(mean.values)))}",
    )


def _gallery(
    ledger: LedgerTable,
    moment: Moment,
    attacks: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    class_names: Sequence[str] | None,
) -> str:
    here = [
        a
        for a in attacks
        if "original" in a and (int(a["epoch"]), int(a["step"])) == tuple(moment)
    ]
    if not here:
        return ""
    shown = here[-1]
    place = {int(sample): i for i, sample in enumerate(shown["sample"])}
    psnr = {k: ledger.columns.get((moment, f"audit/{k}/psnr")) for k in kinds}
    verdict = {k: ledger.columns[moment, f"audit/{k}/verdict"] for k in kinds}

    def best(sample: int) -> float:
        found = [c.at(sample)[0] for c in psnr.values() if c is not None]
        known = [v for v in found if math.isfinite(v)]
        return max(known, default=math.inf)

    labels = dict(zip(shown["sample"].tolist(), shown["class"].tolist(), strict=True))
    worst = {y: max(best(s) for s in labels if labels[s] == y) for y in labels.values()}
    order = sorted(labels, key=lambda s: (-worst[labels[s]], labels[s], -best(s)))
    head = ['<th scope="col">sample</th>', '<th scope="col">original</th>']
    for kind in kinds:
        head.append(
            f'<th scope="col">{esc(KINDS[kind])}'
            f"<small>reconstruction | difference</small></th>"
        )
    rows = []
    for sample in order[:_MOST_SHOWN]:
        i = place[sample]
        original = shown["original"][i]
        cells = [
            f'<td class="name">#{sample}<div class="soft">'
            f"{esc(class_label(labels[sample], class_names))}</div></td>",
            f"<td>{_picture(original, f'sample {sample}')}</td>",
        ]
        for kind in kinds:
            cells.append(
                _result_cell(
                    shown.get(kind), original, i, sample, psnr[kind], verdict[kind]
                )
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    more = len(order) - len(rows)
    words = "By class, the class of the best reconstruction first."
    if more > 0:
        words += f" {count(more, 'sample')} more in the ledger."
    return f'<p class="soft">{esc(words)}</p>' + table(
        head, rows, "Originals and reconstructions"
    )


def _result_cell(
    found: Any,
    original: Any,
    place: int,
    sample: int,
    psnr: Column | None,
    verdict: Column,
) -> str:
    pictures = ""
    if found is not None:
        apart = np.abs(found[place].astype(np.int16) - original.astype(np.int16))
        pictures = _picture(found[place], f"reconstruction of sample {sample}")
        pictures += _picture(apart.astype(np.uint8), "difference")
    value = math.nan if psnr is None else psnr.at(sample)[0]
    score, status = verdict.at(sample)
    if is_usable(score, status):
        word, kind = _WORDS.get(score, "not known"), "about" if score < 0.5 else "bad"
    else:
        failed = status_word(status) == "failed"
        word, kind = "failed" if failed else "inconclusive", "about"
    level = psnr_level(value) if value >= HARDLY_BELOW else ""
    return (
        f'<td><div class="pair">{pictures}<div>'
        f'<div class="{level}">{esc(decibels(value))}</div>'
        f'<span class="{kind}" title="{esc(status)}">{esc(word)}</span>'
        "</div></div></td>"
    )


def _picture(pixels: Any, name: str) -> str:
    return f'<img class="shot" src="{data_uri(thumbnail(pixels))}" alt="{esc(name)}">'


def _correlations(ledger: LedgerTable, moment: Moment, kinds: Sequence[str]) -> str:
    found: dict[str, dict[str, tuple[float, str]]] = {}
    columns: list[str] = []
    for (when, name), row in ledger.run_level.items():
        if when != moment or not name.startswith(_SPEARMAN):
            continue
        score, _, column = name.removeprefix(_SPEARMAN).partition("/")
        found.setdefault(score, {})[column] = (row.value, row.status)
        if column not in columns:
            columns.append(column)
    if not found:
        return ""
    head = ['<th scope="col">score</th>']
    for column in columns:
        kind, _, metric = column.partition("/")
        start = "worst case" if kind == "near" else "practical"
        head.append(
            f'<th scope="col" class="num">{esc(metric)}<small>{start}</small></th>'
        )
    rows = []
    for score, cells in found.items():
        line = [f'<td class="mono">{esc(score)}</td>']
        for column in columns:
            value, status = cells.get(column, (math.nan, "not computed"))
            line.append(_rho(value, status))
        rows.append(f"<tr>{''.join(line)}</tr>")
    words = (
        "Rank correlation (Spearman) of each score with what the attack achieved on "
        "the same samples, with a 95 % bootstrap interval. Scores that mean “less "
        "exposed” should be negative with PSNR and SSIM. Compare with the baselines "
        "image_std, image_tv, loss and grad_norm, which know nothing of the Jacobian."
    )
    return f'<p class="soft">{esc(words)}</p>' + table(
        head, rows, "Correlation of scores with attack quality"
    )


def _rho(value: float, status: str) -> str:
    if not is_usable(value, status):
        word = status_word(status) or "not known"
        return (
            f'<td class="num"><span class="about" title="{esc(status)}">{esc(word)}'
            f"</span></td>"
        )
    reason = status_reason(status)
    interval = reason[reason.find("[") : reason.find("]") + 1] if "[" in reason else ""
    text = f"{value:+.2f}".replace("-", "−")
    return (
        f'<td class="num" title="{esc(reason)}">{text} '
        f'<span class="soft">{esc(interval.replace("-", "−"))}</span></td>'
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
        for reason, number in reasons.most_common(4):
            items.append(
                f"<li><strong>{esc(KINDS[kind])}, {count(number, 'sample')}:</strong> "
                f"{esc(reason)}</li>"
            )
    if not items:
        return ""
    return (
        '<div class="notice"><strong>Inconclusive attacks.</strong> They show nothing '
        f"about these samples, for these reasons:<ul>{''.join(items)}</ul></div>"
    )

"""Originals beside what attacks made of them, with a verdict for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from leakwatch.reporting.html.markup import esc, table
from leakwatch.reporting.html.png import data_uri, thumbnail
from leakwatch.reporting.ledger.rows import is_usable, status_word
from leakwatch.reporting.ledger.table import Column, LedgerTable, Moment
from leakwatch.reporting.quantities import class_label
from leakwatch.reporting.statistics.achieved import KINDS, conclusive_values
from leakwatch.reporting.words import HARDLY_BELOW, count, decibels, psnr_level

__all__ = ["gallery"]

_MOST_SHOWN: Final = 60
_WORDS: Final = {1.0: "recovered", 0.5: "partly", 0.0: "not recovered"}


def gallery(
    ledger: LedgerTable,
    moment: Moment,
    attacks: Sequence[Mapping[str, Any]],
    kinds: Sequence[str],
    class_names: Sequence[str] | None,
) -> str:
    """Return original, reconstruction and difference of each attacked sample.

    Args:
        ledger: The run.
        moment: Of the audit.
        attacks: Its reconstructions; none gives an empty text.
        kinds: Of start.
        class_names: By label.
    """
    here = [
        a
        for a in attacks
        if "original" in a and (int(a["epoch"]), int(a["step"])) == tuple(moment)
    ]
    if not here:
        return ""
    shown = here[-1]
    labels = dict(zip(shown["sample"].tolist(), shown["class"].tolist(), strict=True))
    order = _order(ledger, moment, labels, kinds)
    head = ['<th scope="col">sample</th>', '<th scope="col">original</th>']
    for kind in kinds:
        head.append(
            f'<th scope="col">{esc(KINDS[kind])}'
            f"<small>reconstruction | difference</small></th>"
        )
    place = {int(sample): i for i, sample in enumerate(shown["sample"])}
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
            found = shown.get(kind)
            pictures = "" if found is None else _pictures(found[i], original, sample)
            cells.append(_result_cell(ledger, moment, kind, sample, pictures))
        rows.append(f"<tr>{''.join(cells)}</tr>")
    more = len(order) - len(rows)
    words = (
        "By class, the class of the best reconstruction first; of inconclusive "
        "attacks, the picture shows how far they came, and may be recognisable."
    )
    if more > 0:
        words += f" {count(more, 'sample')} more in the ledger."
    return f'<p class="soft">{esc(words)}</p>' + table(
        head, rows, "Originals and reconstructions"
    )


def _order(
    ledger: LedgerTable,
    moment: Moment,
    labels: Mapping[int, int],
    kinds: Sequence[str],
) -> list[int]:
    columns = [conclusive_values(ledger, moment, kind, "psnr") for kind in kinds]

    def best(sample: int) -> float:
        found = [c.at(sample)[0] for c in columns if c is not None]
        return max((v for v in found if not math.isnan(v)), default=-math.inf)

    worst = {y: max(best(s) for s in labels if labels[s] == y) for y in labels.values()}
    return sorted(labels, key=lambda s: (-worst[labels[s]], labels[s], -best(s)))


def _result_cell(
    ledger: LedgerTable, moment: Moment, kind: str, sample: int, pictures: str
) -> str:
    psnr: Column | None = ledger.columns.get((moment, f"audit/{kind}/psnr"))
    value = math.nan if psnr is None else psnr.at(sample)[0]
    score, status = ledger.columns[moment, f"audit/{kind}/verdict"].at(sample)
    level = psnr_level(value) if value >= HARDLY_BELOW else ""
    if is_usable(score, status):
        word, style = _WORDS.get(score, "not known"), "about" if score < 0.5 else "bad"
    else:
        failed = status_word(status) == "failed"
        word, style, level = "failed" if failed else "inconclusive", "about", "soft"
    text = "" if math.isnan(value) else f'<div class="{level}">{decibels(value)}</div>'
    return (
        f'<td><div class="pair">{pictures}<div>{text}'
        f'<span class="{style}" title="{esc(status)}">{esc(word)}</span>'
        "</div></div></td>"
    )


def _pictures(found: Any, original: Any, sample: int) -> str:
    apart = np.abs(found.astype(np.int16) - original.astype(np.int16))
    return _picture(found, f"reconstruction of sample {sample}") + _picture(
        apart.astype(np.uint8), "difference"
    )


def _picture(pixels: Any, name: str) -> str:
    return f'<img class="shot" src="{data_uri(thumbnail(pixels))}" alt="{esc(name)}">'

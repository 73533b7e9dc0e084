"""The table of correlations: which scores foresaw what attacks achieved."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

from leakwatch.reporting.html.markup import esc, table
from leakwatch.reporting.ledger.rows import is_usable, status_reason, status_word
from leakwatch.reporting.ledger.table import LedgerTable, Moment
from leakwatch.reporting.quantities import Quantity, describe
from leakwatch.reporting.statistics.achieved import KINDS, Achieved
from leakwatch.reporting.words import count

__all__ = ["SPEARMAN", "correlations"]

#: First part of the names of correlations; score, kind of start and metric follow.
SPEARMAN: Final = "audit/spearman/"

_INTERVAL: Final = re.compile(r"\[[^\]]*\]")
_PAIRS: Final = re.compile(r"n = (\d+)")
_MANY: Final = 20

_Cells = dict[str, dict[str, tuple[float, str]]]


def correlations(
    ledger: LedgerTable,
    moment: Moment,
    kinds: Mapping[str, Achieved],
    quantities: Mapping[str, Quantity],
) -> str:
    """Return the correlations of one audit; empty where none was recorded.

    Starts without a defined correlation have no column, but a sentence.

    Args:
        ledger: The run.
        moment: Of the audit.
        kinds: What each kind of attack achieved.
        quantities: Descriptions, which give the direction of scores.
    """
    found, columns = _found(ledger, moment)
    if not found:
        return ""
    cells = [cell for line in found.values() for cell in line.items()]
    shown = {
        column.partition("/")[0] for column, known in cells if is_usable(*known)
    } & kinds.keys()
    columns = [column for column in columns if column.partition("/")[0] in shown]
    silent = [
        f"{KINDS[kind]}: no correlation, {_why(known)}."
        for kind, known in kinds.items()
        if kind not in shown
    ]
    without = "".join(f'<p class="soft">{esc(text)}</p>' for text in silent)
    heading = "<h3>Which scores foresaw it</h3>"
    if not columns:
        return heading + without
    head = ['<th scope="col">score</th>']
    for column in columns:
        kind, _, metric = column.partition("/")
        head.append(
            f'<th scope="col" class="num">{esc(metric)}'
            f"<small>{esc(KINDS[kind].partition(' (')[0])}, {_used(kinds[kind])}"
            "</small></th>"
        )
    rows = []
    for score, line in found.items():
        about = describe(score, quantities).direction or "no direction of its own"
        row = [
            f'<td class="mono">{esc(score)}<div class="soft small">{esc(about)}'
            "</div></td>"
        ]
        row += [_cell(*line.get(c, (math.nan, "not computed"))) for c in columns]
        rows.append(f"<tr>{''.join(row)}</tr>")
    number_of = sum(is_usable(*known) for column, known in cells if column in columns)
    return f'{heading}<p class="soft">{esc(_words(number_of))}</p>{without}' + table(
        head, rows, "Correlation of scores with attack quality"
    )


def _found(ledger: LedgerTable, moment: Moment) -> tuple[_Cells, list[str]]:
    """Return the cells by score and column, and the columns in their order."""
    found: _Cells = {}
    for (when, name), row in ledger.run_level.items():
        if when == moment and name.startswith(SPEARMAN):
            score, _, column = name.removeprefix(SPEARMAN).partition("/")
            found.setdefault(score, {})[column] = (row.value, row.status)
    return found, list(dict.fromkeys(c for line in found.values() for c in line))


def _words(number_of: int) -> str:
    words = (
        "Rank correlation (Spearman) of each score with what conclusive attacks "
        "achieved, with a 95 % bootstrap interval. A score that foresees attacks is "
        "positive with PSNR and SSIM if higher means more exposed, negative if less; "
        "with LPIPS the other way round. It should beat image_std, image_tv, loss and "
        "grad_norm, which know nothing of the Jacobian. Inconclusive attacks are left "
        "out, since their images say how they failed; that selects samples by the "
        "result: hover over a number for the same with failed ones included."
    )
    if number_of >= _MANY:
        words += (
            f" Of {number_of} such intervals about {max(round(number_of / 20), 1)} "
            "would exclude zero if no score were related to any attack."
        )
    return words


def _used(known: Achieved) -> str:
    return f"{known.conclusive} of {known.attacked} conclusive"


def _why(known: Achieved) -> str:
    if not known.conclusive:
        return f"no attack on {count(known.attacked, 'sample')} was conclusive"
    return f"{_used(known)}, too few or all alike"


def _cell(value: float, status: str) -> str:
    reason = status_reason(status)
    if not is_usable(value, status):
        word = status_word(status) or "not known"
        return (
            f'<td class="num"><span class="about" title="{esc(reason)}">{esc(word)}'
            f"</span></td>"
        )
    text = f"{value:+.2f}".replace("-", "−")
    interval, pairs = _INTERVAL.search(reason), _PAIRS.search(reason)
    about = [interval[0].replace("-", "−")] if interval else []
    about += [f"n = {pairs[1]}"] if pairs else []
    return (
        f'<td class="num" title="{esc(reason)}">{text}'
        f'<div class="soft small">{esc(", ".join(about))}</div></td>'
    )

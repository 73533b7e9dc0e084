"""The scalars that a probe step sends to loggers, and their keys: an API.

A dashboard makes a section of each first part of a key. There are three:

- ``<prefix>/…``: about ten that say how exposed the samples are, and what it cost;
- ``<prefix>-class/<class>/<quantity>``: means of classes;
- ``<prefix>-detail/…``: everything else.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import nan
from typing import Final, Literal

from leakwatch.reporting.ledger.rows import Row
from leakwatch.reporting.ledger.table import LedgerTable
from leakwatch.reporting.quantities import ACHIEVED, Quantity, class_name, describe
from leakwatch.reporting.statistics.aggregates import (
    spread_of_classes,
    summarize,
    summarize_classes,
)
from leakwatch.reporting.statistics.headline import find_headline
from leakwatch.reporting.words import CLEARLY_ABOVE

__all__ = ["PREFIX", "SHARE_ABOVE", "class_tags", "extreme_of", "log_scalars"]

#: First part of all keys, if nothing else is asked for.
PREFIX: Final = "leakwatch"

#: Share of samples with a predicted PSNR of which more is recognisable than not.
SHARE_ABOVE: Final = f"share_above_{CLEARLY_ABOVE:g}"

_STATISTICS: Final = ("median", "p05", "p95", "worst")

# What stands beside the headline in the overview.
_OVERVIEW: Final = {
    "seconds",
    "time_fraction",
    "lavp_l2_max/median",
    *(f"{name}/{statistic}" for name in ACHIEVED for statistic in ("median", "worst")),
    *(
        f"{name.rpartition('/')[0]}/{share}"
        for name in ACHIEVED
        for share in ("recovered", "conclusive")
    ),
}


def log_scalars(
    rows: Iterable[Row],
    quantities: Mapping[str, Quantity] | None = None,
    class_names: Sequence[str] | None = None,
    *,
    per_class: Collection[str] | None = None,
    prefix: str = PREFIX,
) -> dict[str, float]:
    """Return key to value for the rows of one probe step.

    Keys of the headline, whichever quantity it is: ``<prefix>/psnr/<median|worst>``,
    ``…/psnr/share_above_20`` of the samples with a number, ``…/psnr/class_gap``
    (highest minus lowest mean of a class, dB),
    ``<prefix>/samples/<known|unknown|bounds>``. Beside them
    ``<prefix>/lavp_l2_max/median``, ``<prefix>/<seconds|time_fraction>`` and
    ``<prefix>/audit/<near|random>/<psnr/median|psnr/worst|recovered|conclusive>``.

    All others: ``<prefix>-class/<class>/<quantity>``,
    ``<prefix>-detail/<quantity>/<median|p05|p95|worst|class_ratio|class_gini>``, and
    ``<prefix>-detail/<quantity>`` for what is measured of the run.

    NaN stands for "no usable value", so that the keys of a run stay the same.
    ``worst`` is left out for quantities without a direction; ratio and Gini
    coefficient for decibels, and where fewer than two classes were recorded.

    Args:
        rows: Rows of one step; of several, only the latest counts.
        quantities: Descriptions, which give the directions.
        class_names: Names of the classes, by label.
        per_class: Quantities that get a key per class; all by default.
        prefix: First part of the keys.

    Example:
        >>> rows = [Row(0, 0, 7, 0, "i2f_psnr", 20.0),
        ...         Row(0, 0, 8, 1, "i2f_psnr", 30.0)]
        >>> found = log_scalars(rows, class_names=["cat", "dog"])
        >>> found["leakwatch/psnr/worst"], found["leakwatch-class/cat/i2f_psnr"]
        (30.0, 20.0)
    """
    table = LedgerTable.from_rows(rows)
    if not table.moments:
        return {}
    moment = table.moments[-1]
    now = LedgerTable((moment,), table.quantities, table.columns)
    scalars = {f"{prefix}/{key}": v for key, v in _headline(now).items()}
    found: dict[str, float] = {}
    for quantity, column in table.at(moment).items():
        description = describe(quantity, quantities)
        summary = summarize(column, description.sign)
        for statistic in _STATISTICS:
            if statistic != "worst" or description.sign:
                found[f"{quantity}/{statistic}"] = getattr(summary, statistic)
        classes = summarize_classes(column)
        tags = class_tags((row.label for row in classes), class_names)
        if per_class is None or quantity in per_class:
            for row in classes:
                scalars[f"{prefix}-class/{tags[row.label]}/{quantity}"] = row.mean
        if len(classes) > 1 and not description.logarithmic:
            spread = spread_of_classes(classes, description)
            found[f"{quantity}/class_ratio"] = spread.ratio
            found[f"{quantity}/class_gini"] = spread.gini
    for (when, quantity), run_row in table.run_level.items():
        if when == moment:
            found[quantity] = run_row.value if run_row.usable else nan
    for key, value in found.items():
        group = "" if key in _OVERVIEW else "-detail"
        scalars[f"{prefix}{group}/{key}"] = value
    return scalars


def extreme_of(
    key: str, quantities: Mapping[str, Quantity] | None = None, prefix: str = PREFIX
) -> Literal["max", "min", ""]:
    """Which end of the history of a key is its worst; empty for most keys.

    Args:
        key: From :func:`log_scalars`.
        quantities: Descriptions, which give the directions.
        prefix: First part of the key.

    Example:
        >>> extreme_of("leakwatch/psnr/worst"), extreme_of("leakwatch/psnr/median")
        ('max', '')
    """
    name, _, statistic = key.removeprefix(prefix).rpartition("/")
    name = name.removeprefix("-detail").removeprefix("/")
    if statistic != "worst":
        return ""
    return "max" if name == "psnr" or describe(name, quantities).sign > 0 else "min"


def _headline(now: LedgerTable) -> dict[str, float]:
    """What one probe step comes to, in keys that don't depend on the attacker."""
    found = find_headline(now)
    if found is None:
        return {}
    summary = found.summary
    spread = spread_of_classes(summarize_classes(found.column))
    return {
        "psnr/median": summary.median,
        "psnr/worst": summary.worst,
        f"psnr/{SHARE_ABOVE}": found.clearly / summary.used if summary.used else nan,
        "psnr/class_gap": spread.difference,
        "samples/known": float(summary.used),
        "samples/unknown": float(summary.count - summary.used),
        "samples/bounds": float(summary.bounds),
    }


def class_tags(labels: Iterable[int], names: Sequence[str] | None) -> dict[int, str]:
    """Return one distinct path segment per class.

    Slashes would open a new level in a logger's tree, and some loggers refuse all
    values of a step for one letter outside ASCII: such become underscores. Classes
    that are then of equal name, or without any, carry their label.

    Example:
        >>> class_tags([0, 1, 2, 3], ["cat", "cat", "truck/van", "été"])
        {0: 'cat-0', 1: 'cat-1', 2: 'truck_van', 3: 'ete'}
        >>> class_tags([0, 1], ["猫", "犬"])
        {0: '0', 1: '1'}
    """
    ordered = sorted(set(labels))
    all_labels = {*ordered, *range(len(names or ()))}
    plain = {
        label: _safe(class_name(label, names)) or str(label) for label in all_labels
    }
    taken = list(plain.values())
    return {
        label: plain[label]
        if taken.count(plain[label]) == 1
        else f"{plain[label]}-{label}"
        for label in ordered
    }


def _safe(name: str) -> str:
    """Letters, digits, ``_``, ``-``, ``.`` and blanks of ASCII; maybe nothing."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode()
    return re.sub(r"[^A-Za-z0-9_. -]+", "_", plain).strip("_. -")

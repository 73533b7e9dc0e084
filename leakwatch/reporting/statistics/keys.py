"""The names under which values are logged: an API, so built in this place only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

from leakwatch.reporting.quantities import class_name

PREFIX: Final = "leakwatch"
SECONDS: Final = f"{PREFIX}/seconds"
TIME_FRACTION: Final = f"{PREFIX}/time_fraction"

Statistic = Literal["median", "p05", "p95", "worst"]
STATISTICS: Final[tuple[Statistic, ...]] = ("median", "p05", "p95", "worst")


def score_key(score: str, statistic: Statistic) -> str:
    """Return the key of a statistic over all probes.

    Example:
        >>> score_key("i2f_psnr", "worst")
        'leakwatch/i2f_psnr/worst'
    """
    return f"{PREFIX}/{score}/{statistic}"


def class_key(tag: str, score: str) -> str:
    """Return the key of a class mean; ``tag`` comes from `class_tags`.

    Example:
        >>> class_key("dog", "i2f_psnr")
        'leakwatch/class/dog/i2f_psnr'
    """
    return f"{PREFIX}/class/{tag}/{score}"


def class_ratio_key(score: str) -> str:
    """Return the key of the highest class mean over the lowest.

    Example:
        >>> class_ratio_key("i2f")
        'leakwatch/i2f/class_ratio'
    """
    return f"{PREFIX}/{score}/class_ratio"


def class_gini_key(score: str) -> str:
    """Return the key of the Gini coefficient of the class means.

    Example:
        >>> class_gini_key("i2f")
        'leakwatch/i2f/class_gini'
    """
    return f"{PREFIX}/{score}/class_gini"


def run_key(quantity: str) -> str:
    """Return the key of a run-level quantity.

    Example:
        >>> run_key("seconds") == SECONDS
        True
    """
    return f"{PREFIX}/{quantity}"


def class_tags(labels: Iterable[int], names: Sequence[str] | None) -> dict[int, str]:
    """Return one distinct path segment per class.

    Slashes would open a new level in a logger's tree and become underscores;
    classes of equal name carry their label.

    Example:
        >>> class_tags([0, 1, 2], ["cat", "cat", "truck/van"])
        {0: 'cat-0', 1: 'cat-1', 2: 'truck_van'}
    """
    ordered = sorted(set(labels))
    known = {*ordered, *range(len(names or ()))}
    plain = {
        label: class_name(label, names).replace("/", "_").strip() or str(label)
        for label in known
    }
    taken = list(plain.values())
    return {
        label: plain[label]
        if taken.count(plain[label]) == 1
        else f"{plain[label]}-{label}"
        for label in ordered
    }

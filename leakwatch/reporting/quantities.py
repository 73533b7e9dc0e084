"""What quantities and classes are called, as ``run.json`` describes them.

The score registry is the one place that defines scores; the monitor writes its
descriptions into the run's metadata, and reporting reads them from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

HIGHER_MORE: Final = "higher = more exposed"
HIGHER_LESS: Final = "higher = less exposed"

HEADLINES: Final = {
    "joint_i2f_bayes_psnr": "knows mean and spread of the pixels",
    "i2f_range_psnr": "knows the range of pixels and {prior}",
    "i2f_bayes_psnr": "knows {prior}",
    "i2f_psnr": "knows nothing about images",
}
"""Predicted PSNR, the number that a person understands, and of which attacker: the
strongest that can be computed first. See :func:`knows`."""

PRIOR: Final = "mean and spread of the pixels"
"""What attackers know of images where a run doesn't say."""

ACHIEVED: Final = ("audit/near/psnr", "audit/random/psnr")
"""PSNR that attacks achieved, worst case first."""

BACKGROUND: Final = ("image_", "audit/baseline/")
"""How names begin of what is known of an image without any message or attack."""

LAYERS: Final = "layers/"
"""How names of the shares of layers begin; the rest is the layer's name."""

SPEARMAN: Final = "audit/spearman/"
"""How names of correlations begin; score, kind of start and metric follow."""


@final
@dataclass(frozen=True)
class Quantity:
    """Description of one quantity.

    Args:
        name: Name in the ledger.
        unit: Unit, empty when it has none.
        direction: `HIGHER_MORE`, `HIGHER_LESS`, or empty when the quantity says
            nothing about exposure by itself.
        meaning: One sentence.
        source: Paper and equation.
    """

    name: str
    unit: str = ""
    direction: str = ""
    meaning: str = ""
    source: str = ""

    @property
    def sign(self) -> int:
        """+1 if a higher value is more exposed, -1 if less, 0 if unknown.

        Example:
            >>> Quantity("i2f", direction="higher = less exposed").sign
            -1
        """
        return {HIGHER_MORE: 1, HIGHER_LESS: -1}.get(self.direction, 0)

    @property
    def logarithmic(self) -> bool:
        """Whether values are decibels, whose ratios mean nothing."""
        return self.unit.lower() in {"db", "decibel", "decibels"}


def knows(name: str, prior: str = PRIOR) -> str:
    """Say what the attacker of a headline knows.

    Args:
        name: One of :data:`HEADLINES`.
        prior: What the run's predictions take for known of images.

    Example:
        >>> knows("i2f_range_psnr", "the statistics of the data set")
        'knows the range of pixels and the statistics of the data set'
    """
    return HEADLINES[name].format(prior=prior)


def quantities_from_metadata(metadata: Mapping[str, Any]) -> dict[str, Quantity]:
    """Read the descriptions in ``metadata["quantities"]``.

    Entries that are not mappings are left out, unknown fields are ignored.

    Example:
        >>> found = quantities_from_metadata({"quantities": {"i2f": {"unit": "px"}}})
        >>> found["i2f"].unit
        'px'
    """
    entries = metadata.get("quantities")
    if not isinstance(entries, Mapping):
        return {}
    return {
        str(name): Quantity(
            name=str(name),
            **{
                field: str(entry.get(field) or "")
                for field in ("unit", "direction", "meaning", "source")
            },
        )
        for name, entry in entries.items()
        if isinstance(entry, Mapping)
    }


def describe(name: str, quantities: Mapping[str, Quantity] | None) -> Quantity:
    """Return the description of ``name``, or an empty one.

    Predicted and achieved PSNR are decibels by definition, so they keep their unit
    and direction in a run without metadata.
    """
    if quantities is not None and name in quantities:
        return quantities[name]
    if name in (*HEADLINES, *ACHIEVED):
        return Quantity(name, unit="dB", direction=HIGHER_MORE)
    return Quantity(name)


def ordered(names: Iterable[str], lead: str = "") -> list[str]:
    """Put what a reader came for first, and what only describes an image last.

    That is predicted PSNR, then the PSNR that attacks achieved; the others keep
    their order.

    Args:
        names: Of quantities.
        lead: The one on top of the page, where that is known; it goes first.

    Example:
        >>> ordered(["image_std", "loss", "audit/near/psnr", "i2f_psnr"])
        ['i2f_psnr', 'audit/near/psnr', 'loss', 'image_std']
    """
    unique = list(dict.fromkeys(names))
    known = dict.fromkeys((lead, *HEADLINES, *ACHIEVED))
    first = [name for name in known if name in unique]
    last = [name for name in unique if name.startswith(BACKGROUND)]
    return first + [name for name in unique if name not in (*first, *last)] + last


def class_names_from_metadata(metadata: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the class names in the order of the labels, or None."""
    names = metadata.get("class_names")
    if isinstance(names, list | tuple) and names:
        return tuple(str(name) for name in names)
    return None


def class_name(label: int, names: Sequence[str] | None) -> str:
    """Return the name of a class, or its number where it has no name.

    Example:
        >>> class_name(1, ("cat", "dog")), class_name(7, ("cat", "dog"))
        ('dog', '7')
    """
    if names is not None and 0 <= label < len(names) and names[label]:
        return names[label]
    return str(label)


def class_label(label: int | None, names: Sequence[str] | None) -> str:
    """Return the name of a class as a reader meets it in a sentence.

    Example:
        >>> class_label(1, ("cat", "dog")), class_label(7, None)
        ('dog', 'class 7')
    """
    if label is None:
        return "no class"
    name = class_name(label, names)
    return f"class {name}" if name == str(label) else name

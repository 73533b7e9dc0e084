"""Settings of attacks that are changed by name."""

from __future__ import annotations

from collections.abc import Collection, Iterable

__all__ = ["refuse_unknown"]


def refuse_unknown(attack: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises for settings that an attack does not have.

    Args:
        attack: its name.
        given: names of the settings that are to be changed.
        known: names of those that there are.

    Raises:
        ValueError: for a setting that there isn't; lists those that there are.

    Example:
        >>> refuse_unknown("dlg", ["steps"], ["steps", "lr"])
    """
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f"unknown setting {', '.join(unknown)} of attack {attack!r}; choose from "
            f"{', '.join(sorted(known))}."
        )

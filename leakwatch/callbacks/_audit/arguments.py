"""Arguments that audits of gradients and of weight updates have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from leakwatch.attacks.named import PublishedAttack
from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_integer, check_number

__all__ = ["METRICS", "chosen_attack", "restarts_or", "seconds_or", "steps_or"]

#: Quality that is measured unless said otherwise.
METRICS: Final = ("mse", "psnr", "ssim")


def chosen_attack(
    argument: str,
    given: Any,
    steps: int | None,
    get: Callable[[str], PublishedAttack[Any]],
    *,
    example: str,
    optional: bool = False,
) -> tuple[Any, int, StartKind]:
    """The attack, how many tries it takes by default, and where these begin.

    Args:
        argument: its name.
        given: a preset's name, or an attack object.
        steps: instead of the preset's, see :func:`steps_or`; ``None`` leaves them.
        get: presets by name.
        example: one of them, for error texts.
        optional: whether the argument may be ``None``, for error texts.

    Raises:
        TypeError: for anything else.
        ValueError: for a name that is unknown, or steps for an object.
    """
    if isinstance(given, str):
        preset = get(given)
        attack = preset.attack
        chosen = attack if steps is None else attack.changed(steps=steps)
        return chosen, preset.restarts, preset.start
    runs = callable(getattr(given, "run", None)) and hasattr(given, "name")
    if isinstance(given, type) or not runs:
        kinds = ", an attack object or None" if optional else " or an attack object"
        raise TypeError(
            f"{argument} must be the name of a preset{kinds}, got "
            f"{type(given).__name__}; for instance {argument}={example!r}."
        )
    if steps is not None:
        raise ValueError(
            f"steps={steps} is for presets; {argument} is an object with its own."
        )
    return given, 1, "normal"


def steps_or(given: int | None) -> int | None:
    """Steps of an attack; ``None`` for the preset's.

    Raises:
        TypeError: for no integer.
        ValueError: for one below 1.
    """
    if given is None:
        return None
    return check_integer("steps", given, example=300, smallest=1)


def restarts_or(given: int | None, default: int) -> int:
    """Tries from random starts.

    Raises:
        TypeError: for no integer.
        ValueError: for one below 1.
    """
    if given is None:
        return default
    return check_integer("restarts", given, example=3, smallest=1)


def seconds_or(time_limit: float | None) -> float | None:
    """Seconds that an attack may take; ``None`` for no limit.

    Raises:
        TypeError: for no number.
        ValueError: for one that is not positive and finite.
    """
    if time_limit is None:
        return None
    return check_number("time_limit", time_limit, example=60.0)

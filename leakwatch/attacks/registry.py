"""Attacks as they were published, by name: what presets are made of."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_integer
from leakwatch.names import unknown

__all__ = ["PublishedAttack", "Registry"]


class NamedAttack(Protocol):
    """What can be registered."""

    @property
    def name(self) -> str:
        """What it is asked for by."""


A = TypeVar("A", bound=NamedAttack)


@final
@dataclass(frozen=True)
class PublishedAttack(Generic[A]):
    """An attack as it was published.

    Attributes:
        attack: with its settings; ``attack.name`` is the preset's name.
        start: where it begins.
        restarts: how often, the best taken.
        source: the paper.
        differs: where this differs from what was published, and why.
    """

    attack: A
    start: StartKind = "normal"
    restarts: int = 1
    source: str = ""
    differs: str = ""

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return self.attack.name


@final
class Registry(Generic[A]):
    """Published attacks of one kind, by name.

    Args:
        kind: what they are, for error texts: ``"attack"``.

    Example:
        >>> from leakwatch.attacks import FirstOrder
        >>> registry = Registry[FirstOrder]("attack")
        >>> mine = PublishedAttack(FirstOrder(name="mine"), restarts=2)
        >>> registry.register(mine) is registry.get("mine"), registry.available()
        (True, ('mine',))
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._presets: dict[str, PublishedAttack[A]] = {}

    def register(self, preset: PublishedAttack[A]) -> PublishedAttack[A]:
        """Makes an attack available by name.

        Args:
            preset: the attack, where it begins and where it comes from.

        Returns:
            The same preset.

        Raises:
            ValueError: if the name is taken, or there is none.
        """
        if not preset.name:
            raise ValueError(
                f"a {type(preset.attack).__name__} has no name to be found by; make "
                f"its class a @dataclass(frozen=True) with a field "
                f"name: str = 'my-attack'."
            )
        if preset.name in self._presets:
            raise ValueError(
                f"an {self._kind} named {preset.name!r} is registered already; choose "
                f"another name."
            )
        self._presets[preset.name] = preset
        return preset

    def available(self) -> tuple[str, ...]:
        """Names of all presets, in the order in which they were registered."""
        return tuple(self._presets)

    def get(self, name: str) -> PublishedAttack[A]:
        """The preset of that name.

        Args:
            name: for instance ``"inverting-gradients"`` or, for updates, ``"sme"``.

        Returns:
            The preset.

        Raises:
            ValueError: if there is none; lists those that there are.
        """
        if name not in self._presets:
            raise ValueError(unknown(self._kind, name, self._presets))
        return self._presets[name]

    def resolve(
        self, attack: str | A, steps: int | None, settings: dict[str, object]
    ) -> PublishedAttack[A]:
        """A preset, or an attack object as if it were one, with other settings.

        Args:
            attack: name of a preset, or an attack.
            steps: instead of its own; ``None`` leaves them.
            settings: others, by name.

        Raises:
            TypeError: for anything else than a name or an attack.
            ValueError: for an unknown name, or settings that can't be changed.
        """
        if isinstance(attack, str):
            preset = self.get(attack)
        else:
            preset = PublishedAttack(_checked_attack(attack))
        if steps is not None:
            steps = check_integer("steps", steps, example=300)
            settings = {"steps": steps, **settings}
        if not settings:
            return preset
        change = getattr(preset.attack, "changed", None)
        if change is None:
            raise ValueError(
                f"settings {', '.join(settings)} can't be changed here for a "
                f"{type(preset.attack).__name__}; give them to its constructor."
            )
        return dataclasses.replace(preset, attack=change(**settings))


def _checked_attack(attack: A) -> A:
    other: object = attack
    if isinstance(other, type) or not hasattr(other, "run"):
        what = other.__name__ if isinstance(other, type) else type(other).__name__
        kind = "the class" if isinstance(other, type) else "a"
        raise TypeError(
            f"preset must be the name of one or an attack with a run method, got "
            f"{kind} {what}."
        )
    return attack

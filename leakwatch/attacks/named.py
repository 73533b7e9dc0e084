"""Attacks as they were published, by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, final

from leakwatch.attacks.start import StartKind

__all__ = ["PublishedAttack", "Registry"]


class Named(Protocol):
    """What has a name of its own."""

    @property
    def name(self) -> str:
        """The attack's name, recorded in its results."""


A = TypeVar("A", bound=Named)


@final
@dataclass(frozen=True)
class PublishedAttack(Generic[A]):
    """An attack as it was published.

    Attributes:
        attack: its settings; ``attack.name`` is the preset's name.
        start: where it begins.
        restarts: how often, the best taken.
        source: the paper.
        differs: where this differs from what was published, and why.
    """

    attack: A
    start: StartKind
    restarts: int
    source: str
    differs: str = ""

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return self.attack.name


@final
class Registry(Generic[A]):
    """Published attacks of one kind.

    Args:
        kind: what they are, for error texts: ``"attack"``.

    Example:
        >>> from leakwatch.attacks.first_order import FirstOrder
        >>> registry = Registry[FirstOrder]("attack")
        >>> mine = PublishedAttack(FirstOrder(name="mine"), "normal", 2, "myself")
        >>> registry.register(mine) is registry.get("mine"), registry.available()
        (True, ('mine',))
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._presets: dict[str, PublishedAttack[A]] = {}

    def register(self, preset: PublishedAttack[A]) -> PublishedAttack[A]:
        """Makes an attack available by name.

        Args:
            preset: the attack.

        Returns:
            The same preset.

        Raises:
            ValueError: if the name is taken.
        """
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
            raise ValueError(
                f"unknown {self._kind} {name!r}; choose from "
                f"{', '.join(self._presets)}."
            )
        return self._presets[name]

"""Measured values that never come without their status."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from jaxtyping import Bool
from torch import Tensor

from leakwatch.status import Status

__all__ = ["Measured"]


class Measured(Mapping[str, Tensor]):
    """Values of samples by name, each with a status: base of what measuring returns.

    Attributes:
        numbers: name → values, one for each sample.
        status: name → one :class:`Status` for each value, nested as the values are.
        kind: what a name stands for, in errors.
    """

    numbers: dict[str, Any]
    status: dict[str, Any]
    kind: ClassVar[str]

    def __getitem__(self, name: str) -> Tensor:
        self._check(name)
        value: Tensor = self.numbers[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.numbers)

    def __len__(self) -> int:
        return len(self.numbers)

    def usable(self, name: str) -> Bool[Tensor, "..."]:
        """Which samples have a number worth reading, shaped as the numbers.

        Raises:
            KeyError: if that name is not in the result.
        """
        self._check(name)
        return torch.tensor(_usable(self.status[name]))

    def _check(self, name: str) -> None:
        if name not in self.numbers:
            raise KeyError(
                f"no {self.kind} {name!r} in this result; it holds "
                f"{', '.join(self.numbers)}"
            )


def _usable(status: Sequence[Any]) -> list[Any]:
    return [s.usable if isinstance(s, Status) else _usable(s) for s in status]

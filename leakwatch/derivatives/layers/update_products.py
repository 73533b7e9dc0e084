"""What attacks need of a layer with weights of its own for each of them.

On weight updates every attack has another network: its client's, at its own place
between w_0 and w_T. What a layer does is w·a for a weight w and an input a, linear in
each; so are its adjoint in a, wᵀδ, and its weight gradient, Σ δ aᵀ. All that an attack
needs of the layer's first and second derivatives are these three.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["Operator"]


class Operator(ABC):
    """The products of one kind of layer, for attacks in rows.

    Inputs and gradients hold the attacks' samples one after the other, equally many
    for each; weights have the attacks as their first dimension.
    """

    def rows(self, a: Tensor, attacks: int) -> Tensor:
        """The input as :meth:`apply` and :meth:`gradient` take it."""
        return a

    @abstractmethod
    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        """w·a + b. Of ``like``, the input a, only shape and format are read."""

    @abstractmethod
    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        """wᵀδ, of the shape of the input ``like``, whose numbers are not read."""

    def along(
        self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor, delta: Tensor
    ) -> Tensor:
        """⟨w, Σ δ aᵀ⟩ + ⟨b, Σ δ⟩ of each attack, ``(attacks,)``."""
        # As ⟨w·a + b, δ⟩: reads w once and forms nothing of its size.
        moved = self.apply(w, b, rows, like)
        pair = (t.reshape(len(w), -1) for t in (moved, delta))
        found: Tensor = torch.linalg.vecdot(*pair)
        return found

    def arranged(self, w: Tensor) -> Tensor:
        """The same weights as they lie in memory for :meth:`apply`."""
        return w

    @abstractmethod
    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Σ δ aᵀ and, if asked for, Σ δ of each attack, ``(attacks, numbers)``."""

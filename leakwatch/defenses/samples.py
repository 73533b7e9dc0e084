"""The samples whose gradients are to be protected, for defenses that look at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from leakwatch.checks import check_samples
from leakwatch.defenses.eigen.basis import Basis
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian

__all__ = ["Samples"]


@final
class Samples:
    """Samples, the map to their gradients, and what is derived from them when asked.

    Everything is computed at the weights of the moment when it is first asked for, and
    kept; make new ones after a step of the optimiser.

    Args:
        gradients: the gradient map. float64 resolves more of the directions that a
            gradient shows least.
        x: network inputs.
        y: labels.
        input_scale: d(input)/d(pixel), ``(d_x,)``, see :class:`GradientJacobian`: makes
            box sizes and errors pixels. Default 1.
        max_memory: MiB that may be kept of a Jacobian at a time.
        basis: directions of the same samples from earlier weights, to save their cost.
            Noise is then the image of their u_i under J of now, and its size and
            covariance are those of then: measure δ. Or a function that makes the basis
            from J when it is asked for, such as ``Basis.of``.

    Raises:
        ValueError: if there isn't one label per sample, or the basis is that of other
            samples.
    """

    def __init__(
        self,
        gradients: GradientMap,
        x: Float[Tensor, "n ..."],
        y: Shaped[Tensor, "n ..."],
        *,
        input_scale: Float[Tensor, " d_x"] | None = None,
        max_memory: float | None = None,
        basis: Basis | Callable[[GradientJacobian], Basis] | None = None,
    ) -> None:
        check_samples(x, y)
        if isinstance(basis, Basis) and not torch.equal(basis.jacobian.x, x):
            raise ValueError(
                "this basis is that of other samples; give Samples(...).basis of the "
                "same ones, in their order."
            )
        self._basis = basis
        self.gradients = gradients
        self.x, self.y = x.detach(), y.detach().to(x.device)
        self.max_memory = max_memory
        self._input_scale = input_scale
        self._kept: dict[str, Tensor] = {}

    def __len__(self) -> int:
        """How many."""
        return len(self.x)

    @cached_property
    def gradient(self) -> Float[Tensor, "n d_theta"]:
        """The gradient g of each."""
        return self.gradients(self.x, self.y)

    @cached_property
    def jacobian(self) -> GradientJacobian:
        """J of each."""
        return GradientJacobian(
            self.gradients, self.x, self.y, input_scale=self._input_scale
        )

    @cached_property
    def basis(self) -> Basis:
        """The directions of each; costs an eigendecomposition a sample."""
        if isinstance(self._basis, Basis):
            return self._basis
        if self._basis is not None:
            return self._basis(self.jacobian)
        return Basis.of(self.jacobian, max_memory=self.max_memory)

    def kept(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """What an allocation derives from the samples, computed once.

        Args:
            name: of the quantity, with all that it depends on.
            compute: what gives it.
        """
        if name not in self._kept:
            self._kept[name] = compute()
        return self._kept[name]

    def moved(self, a: Float[Tensor, "n d_x"]) -> Float[Tensor, "n ..."]:
        """The network inputs x + a.

        Args:
            a: in pixels where ``input_scale`` was given, flattened.
        """
        scaled = a.to(self.x.device) * self.jacobian.input_scale.to(a)
        return self.x.double() + scaled.view(self.x.shape).double()

    def select(self, rows: slice) -> Samples:
        """Some of them.

        Args:
            rows: which.
        """
        return Samples(
            self.gradients,
            self.x[rows],
            self.y[rows],
            input_scale=self._input_scale,
            max_memory=self.max_memory,
        )

    def through(self, gradients: GradientMap, row: int) -> Samples:
        """One of them, under another map.

        Args:
            gradients: the map, of the same input.
            row: which sample.
        """
        return Samples(
            gradients,
            self.x[row : row + 1],
            self.y[row : row + 1],
            input_scale=self._input_scale,
            max_memory=self.max_memory,
        )

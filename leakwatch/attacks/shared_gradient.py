"""What an attacker is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from leakwatch.checks import check_integer, check_number, check_samples
from leakwatch.derivatives import GradientMap

__all__ = ["Perturbation", "SharedGradient"]

Perturbation = Callable[[Tensor], Tensor]
"""A defense: gradients ``(targets, d_θ)`` to what is shared, the same shape."""


@final
@dataclass(frozen=True, eq=False)
class SharedGradient:
    """One gradient for each target, and what else a server knows of it.

    Targets are independent of each other: each is one client's message, the gradient
    of the mean loss over ``images`` samples.

    Args:
        gradient: in the order of ``named_parameters()`` that require gradients, as
            :class:`GradientMap` gives it; kept detached.
        labels: class of each sample, or whatever target the criterion takes;
            ``None`` when they are unknown.
        sample_shape: shape of one sample, without a batch dimension.
        images: samples that each gradient is averaged over.
        noise_std: known standard deviation of the Gaussian noise on each entry of the
            gradient, 0 for none.
        index: what names each target's random stream; default its position. Give it
            when targets are attacked in pieces, so that pieces change nothing.
        left: what the private samples themselves leave unmatched, ‖g(x) − g*‖,
            ``(targets,)``. No server knows it: with a defense it tells who audits that
            an attack has found all there is. ``None``: only ``noise_std`` is known.

    Raises:
        ValueError: if shapes don't fit each other, the gradient is not finite, or
            ``noise_std`` is negative.

    Example:
        >>> import torch
        >>> gradients = GradientMap(torch.nn.Linear(3, 2), dtype=torch.float64)
        >>> x, y = torch.rand(4, 3), torch.tensor([0, 1, 1, 0])
        >>> shared = SharedGradient.of(gradients, x, y, images=2)
        >>> shared.targets, shared.gradient.shape, shared.labels.tolist()
        (2, torch.Size([2, 8]), [[0, 1], [1, 0]])
    """

    gradient: Float[Tensor, "targets d_theta"]
    labels: Shaped[Tensor, "targets images ..."] | None
    sample_shape: tuple[int, ...]
    images: int = 1
    noise_std: float = 0.0
    index: tuple[int, ...] | None = None
    left: Float[Tensor, " targets"] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "sample_shape", tuple(self.sample_shape))
        g = self.gradient
        if g.ndim != 2 or len(g) == 0 or not g.is_floating_point():
            raise ValueError(
                f"gradient must be (targets, d_θ), floating point, with at least one "
                f"target, got {tuple(g.shape)} of {g.dtype}."
            )
        if not bool(torch.isfinite(g).all()):
            broken = (~torch.isfinite(g)).any(1).nonzero()[0]
            added = f", noise_std={self.noise_std:g} included" if self.noise_std else ""
            raise ValueError(
                f"the gradient of target {int(broken)} is not finite{added}."
            )
        check_integer("images", self.images)
        if self.labels is not None and self.labels.shape[:2] != (len(g), self.images):
            raise ValueError(
                f"labels must be (targets, images) = {(len(g), self.images)}, then the "
                f"shape of one, got "
                f"{tuple(self.labels.shape)}."
            )
        check_number("noise_std", self.noise_std, "[0, inf)", example=1e-3)
        if self.index is not None and len(self.index) != len(g):
            raise ValueError(
                f"index must name each of the {len(g)} targets, got {len(self.index)}."
            )
        if self.left is not None and self.left.shape != g.shape[:1]:
            raise ValueError(
                f"left must hold one number for each of the {len(g)} targets, got "
                f"{tuple(self.left.shape)}."
            )
        object.__setattr__(self, "gradient", g.detach())

    @classmethod
    def of(
        cls,
        gradients: GradientMap,
        x: Float[Tensor, "n ..."],
        y: Shaped[Tensor, "n ..."],
        *,
        images: int = 1,
        noise_std: float = 0.0,
        generator: torch.Generator | None = None,
        perturb: Perturbation | None = None,
    ) -> SharedGradient:
        """What clients with these samples would share.

        Args:
            gradients: the map from samples to gradients.
            x: true samples, network-input units; each ``images`` successive ones make
                one target.
            y: their labels.
            images: samples per target.
            noise_std: standard deviation of Gaussian noise to add to every entry.
            generator: of the noise, on the CPU; default the global one.
            perturb: a defense to apply to the averaged gradients, before the noise.

        Returns:
            The gradients of all targets, with their labels.

        Raises:
            ValueError: if the samples can't be divided into targets of that many
                images, or ``perturb`` changes the shape.
        """
        check_samples(x, y)
        if images < 1 or len(x) % images:
            raise ValueError(
                f"{len(x)} samples can't be divided into targets of {images} images "
                f"each; pass a multiple."
            )
        if images == 1:
            g = gradients(x, y)
        else:
            # One target at a time: all samples' gradients may not fit memory.
            starts = range(0, len(x), images)
            groups = [slice(i, i + images) for i in starts]
            g = torch.stack([gradients(x[i], y[i]).mean(0) for i in groups])
        clean = g
        if perturb is not None:
            shape = g.shape
            g = perturb(g).to(g)
            if g.shape != shape:
                raise ValueError(
                    f"perturb must keep the shape {tuple(shape)} of the gradients, "
                    f"but returned {tuple(g.shape)}."
                )
        if noise_std > 0:
            # In float64, so that the noise doesn't depend on the map's precision; row
            # by row, because one large fill depends on its size as a whole.
            rows = [
                torch.randn(g.shape[1], dtype=torch.float64, generator=generator)
                for _ in g
            ]
            g = g + noise_std * torch.stack(rows).to(g)
        left = None if perturb is None else (g - clean).double().norm(dim=1)
        return cls(
            g,
            y.reshape(-1, images, *y.shape[1:]),
            tuple(x.shape[1:]),
            images,
            noise_std,
            left=left,
        )

    @property
    def targets(self) -> int:
        """How many there are."""
        return len(self.gradient)

    def without_labels(self) -> SharedGradient:
        """The same, for an attacker who doesn't know the labels."""
        return replace(self, labels=None)

    def select(self, targets: Int[Tensor, " some"] | slice) -> SharedGradient:
        """Some of the targets; their random streams stay the same.

        Args:
            targets: positions, or a slice.

        Returns:
            Those targets, in that order.
        """
        names = torch.tensor(self.index or range(self.targets))[targets]
        return replace(
            self,
            gradient=self.gradient[targets],
            labels=None if self.labels is None else self.labels[targets],
            index=tuple(names.tolist()),
            left=None if self.left is None else self.left[targets],
        )

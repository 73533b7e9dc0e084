"""What is to be measured: samples, and what their scores have to know about them."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.pixel_range import PixelRange, noise_as_it_arrives
from leakwatch.status import Status


@final
@dataclass(frozen=True, eq=False)
class ScoreInputs:
    """Samples at a network, and what their scores have to know about them.

    Attributes:
        gradients: the gradient map.
        x: network inputs, ``(batch, ...)``, on the network's device.
        y: labels, ``(batch,)``.
        input_scale: d(input)/d(pixel), ``(d_x,)``; default: 1.
        offset: x − μ, distance from the prior mean, ``(batch, d_x)``, float64, pixel
            units.
        pixels: x in pixel units, ``(batch, d_x)``, float64; for what an attacker gains
            who knows their range.
        delta: one perturbation of each sample's gradient, ``(batch, d_θ)``.
    """

    gradients: GradientMap
    x: Float[Tensor, "batch ..."]
    y: Int[Tensor, " batch"]
    input_scale: Float[Tensor, " d_x"] | None = None
    offset: Float[Tensor, "batch d_x"] | None = None
    pixels: Float[Tensor, "batch d_x"] | None = None
    delta: Float[Tensor, "batch d_theta"] | None = None

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.x)

    def part(self, which: slice) -> ScoreInputs:
        """Some of the samples."""
        return replace(
            self,
            x=self.x[which],
            y=self.y[which],
            offset=None if self.offset is None else self.offset[which],
            pixels=None if self.pixels is None else self.pixels[which],
            delta=None if self.delta is None else self.delta[which],
        )

    @cached_property
    def jacobian(self) -> GradientJacobian:
        """J of each sample, with respect to pixels."""
        return GradientJacobian(
            self.gradients, self.x, self.y, input_scale=self.input_scale
        )

    @cached_property
    def losses(self) -> Float[Tensor, " batch"]:
        """The loss of each sample, whatever the rest of the batch."""
        try:
            # The last digit of a batched loss depends on the rest of the batch.
            precise = self.gradients.in_dtype(torch.float64).losses(self.x, self.y)
            return precise.to(self.gradients.dtype)
        except Exception:  # a network that has no float64
            rows = [slice(i, i + 1) for i in range(len(self))]
            return torch.cat(
                [self.gradients.losses(self.x[i], self.y[i]) for i in rows]
            )

    @cached_property
    def arriving_noise(self) -> Float[Tensor, "batch draws d_x"]:
        """Jᵀξ of each sample for the same few draws of ξ ~ N(0, I), pixel units."""
        return noise_as_it_arrives(self.jacobian)

    def pixel_range(
        self,
        sample: int,
        h: Float[Tensor, "d_x d_x"],
        max_memory: float | None = None,
    ) -> PixelRange | Status:
        """What an attack in the range of pixels depends on, or why it is not known.

        Args:
            sample: position.
            h: its H, pixel units.
            max_memory: MiB that may be kept of another Jacobian.
        """
        if self.pixels is None or self.offset is None:
            return Status("not computed", "the pixels of the sample are not known")
        return PixelRange(
            h,
            self.pixels[sample],
            self.offset[sample],
            self.arriving_noise[sample],
            functools.partial(self._elsewhere, sample, max_memory),
        )

    def _elsewhere(
        self, sample: int, max_memory: float | None, moved: Float[Tensor, " d_x"]
    ) -> tuple[Float[Tensor, "d_x d_x"], Float[Tensor, " d_x"]]:
        """H and Jᵀξ of the first draw at an image beside a sample, pixel units."""
        scale, x = self.jacobian.input_scale, self.x[sample]
        there = x.double() + (moved.to(scale) * scale).view_as(x)
        jacobian = self.jacobian.at_image(sample, there.to(x))
        h = jacobian.gram(0, max_memory=max_memory).h
        noise = noise_as_it_arrives(jacobian, draws=1)[0, 0]
        return h * float(jacobian.scale[0]) ** 2, noise

    def rounding(
        self, rows: Sequence[int] | None = None, *, directions: int = 3
    ) -> list[float]:
        """‖ΔJ̃‖_F, or 0 where the network has no other precision to compare with.

        Args:
            rows: positions of the samples; default: all.
            directions: see :meth:`GradientJacobian.roundings`.
        """
        try:
            return self.jacobian.roundings(rows, directions).tolist()
        except Exception as error:
            self.gradients.note(
                "how much rounding changes its Jacobian is assumed, not measured: it "
                "can't be evaluated in both float32 and float64 "
                f"({type(error).__name__})"
            )
            return [0.0] * (len(self) if rows is None else len(rows))
